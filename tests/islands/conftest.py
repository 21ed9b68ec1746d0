"""What tests of islands share: where their stores are."""

import pytest
from servers import REAL, serving


@pytest.fixture(scope="module", params=("folder", *REAL))
def place(request, tmp_path_factory):
    """A kind of store, and a URL below which each test has one of its own."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "folder":
        yield request.param, folder.as_uri()
        return
    with serving(request.param, folder) as server:
        yield request.param, server.url
