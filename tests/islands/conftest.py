"""What tests of islands share: where their stores are."""

import pytest
from servers import seaweed


@pytest.fixture(scope="module", params=("folder", "seaweed"))
def place(request, tmp_path_factory):
    """A kind of store, and a URL below which each test has one of its own."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "folder":
        yield request.param, folder.as_uri()
        return
    with seaweed(folder) as url:
        yield request.param, url
