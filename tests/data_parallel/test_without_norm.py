"""Gradients that refuse their norm are otherwise tensors like any other."""

import copy
import io

import pytest
import torch
from torch import nn

from microparallel.data_parallel.unit_bucket import GradientOfShard
from microparallel.errors import UsageError
from microparallel.pipeline.member import GradientOfStage

NUMBERS = torch.arange(6.0).view(2, 3)


@pytest.fixture(params=[GradientOfShard, GradientOfStage])
def parameter(request):
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = NUMBERS.clone().as_subclass(request.param)
    return parameter


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_is_refused_and_changes_nothing(parameter, foreach):
    with pytest.raises(UsageError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_([parameter], 0.1, foreach=foreach)
    assert torch.equal(parameter.grad, NUMBERS)


def test_only_a_whole_gradient_has_a_norm_of_its_own(parameter):
    if isinstance(parameter.grad, GradientOfStage):
        assert parameter.grad.norm() == torch.norm(parameter.grad) == NUMBERS.norm()
    else:
        with pytest.raises(UsageError):
            parameter.grad.norm()


def test_copies_and_results_are_plain(parameter):
    file = io.BytesIO()
    torch.save({"gradient": parameter.grad}, file)
    file.seek(0)
    gradient = parameter.grad
    once, again = copy.deepcopy([gradient, gradient])
    assert once is again
    for one in (once, torch.load(file)["gradient"], gradient.clone(), gradient + 0, gradient.detach()):
        assert type(one) is torch.Tensor
        assert torch.equal(one, NUMBERS)


def test_autograd_adds_to_it_in_place(parameter):
    before = parameter.grad
    (parameter * 2).sum().backward()
    assert parameter.grad is before
    assert torch.equal(before, NUMBERS + 2)
