"""Every model of the zoo trains as in torch: loss, all gradients and state over three steps, dropout on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onnxremat.models.zoo import load_zoo, zoo_entry
from tests.models.test_zoo import factory
from tests.models.training import TOLERANCE, assert_trains_as_torch

#: More than a few seconds.
SLOW = {"resnet50", "resnet101", "resnet18_digits", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "t5", "bart", "whisper", "inception_v1"}
#: So many ReLUs that on every batch some argument lies within rounding of the kink: compared with a smooth activation in their place.
DEEP = {"resnet50", "resnet101", "segnet"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in load_zoo()]


def smoothed(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU):
            setattr(module, name, nn.SiLU())
        else:
            smoothed(child)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_training_equals_torch(name: str) -> None:
    entry = zoo_entry(name)
    torch.default_generator.manual_seed(0)
    module = factory(entry)(**entry.quick.arguments)
    module = smoothed(module) if name in DEEP else module
    result = assert_trains_as_torch(module, entry.quick.inputs, entry.quick.labels, entry.loss)
    compared = {*result.errors, *result.excused}
    assert compared == {"loss", *result.training.trainable, *result.training.state}
    assert result.worst[0] <= TOLERANCE
