"""Codecs: one vector <-> what is sent for it. May import `ops`, the contracts and `_axes`."""
