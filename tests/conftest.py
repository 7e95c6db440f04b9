"""How the tests are shared out between the processes of `make test`."""

from pathlib import Path

import pytest

# Each of these starts clusters of Ray, or drivers that watch one another's clocks: one after the other, beside all else.
ALONE = {"test_chaos", "test_driver", "test_failures", "test_faults", "test_nodes", "test_ownership"}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = Path(item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group("clusters" if file.stem in ALONE else str(file)))
