"""Commands: what people type, one module each. Alone may import rich and matplotlib, the extra cli.

A command is a module `_NAME.py` with `HELP`, one line; `EPILOG`, examples; `add_arguments(parser)`;
and `run(args, console)`, which returns the exit code. `_frame.py` has the list of them.
"""
