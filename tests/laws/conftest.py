import pytest
from laws.cases import CASES, tiny_model


@pytest.fixture(params=list(CASES))
def case(request):
    """Name of a model case: every mixer spec, every hybrid layout, every variant."""
    return request.param


@pytest.fixture
def model(case):
    return tiny_model(case)
