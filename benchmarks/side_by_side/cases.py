"""The models that are compared, and where a careful user would place ``torch.utils.checkpoint`` in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model at a size whose step takes a second or two on two cores.

    Attributes:
        name: how it is called in the table.
        factory: name of a function of this module.
        shape: of the input without its batch; ``classes`` is what integer inputs are drawn below, 0 for images.
        batch: of the timed steps.
        loss: text of a loss.
        regions: patterns of the paths of the submodules that are checkpointed, each as a region of its own; a sequence of plain layers is
            cut into the square root of its length.
    """

    name: str
    factory: str
    shape: tuple[int, ...]
    batch: int
    regions: tuple[str, ...]
    loss: str = "cross_entropy"
    classes: int = 0

    @property
    def source(self) -> str:
        """As ``onnxremat compile`` takes it."""
        return f"benchmarks.side_by_side.cases:{self.factory}"

    def input(self, batch: int) -> str:
        """Text of the input's InputSpec for a batch of this size."""
        shape = "x".join(map(str, (batch, *self.shape)))
        return f"x={shape}" if not self.classes else f"input_ids={shape}:int64:{self.classes}"


def resnet18() -> Any:
    from onnxremat.models.resnet import resnet18 as build

    return build()


def resnet50() -> Any:
    from onnxremat.models.resnet import resnet50 as build

    return build()


def mobilenet_v2() -> Any:
    from onnxremat.models.mobilenet import mobilenet_v2 as build

    return build()


def unet() -> Any:
    from onnxremat.models.unet import unet as build

    return build(width=32)


def vgg16() -> Any:
    from onnxremat.models.vgg import vgg16 as build

    return build(num_classes=100, hidden=512, pooled=1)


def gpt2() -> Any:
    from onnxremat.models.transformer import gpt2 as build

    return build(layers=6, hidden=384, heads=6, vocab=8192, seq=256)


def bert() -> Any:
    from onnxremat.models.transformer import bert_mlm as build

    return build(layers=6, hidden=384, heads=6, vocab=8192, seq=256)


def vit() -> Any:
    from onnxremat.models.patches import VisionTransformer

    return VisionTransformer(num_classes=100, width=384, layers=6, heads=6)


MODELS = {
    model.name: model
    for model in (
        Model("ResNet-18", "resnet18", (3, 224, 224), 8, ("layer?.*",)),
        Model("ResNet-50", "resnet50", (3, 160, 160), 8, ("layer?.*",)),
        Model("MobileNetV2", "mobilenet_v2", (3, 160, 160), 16, ("features.*",)),
        Model("VGG16", "vgg16", (3, 128, 128), 8, ("features",)),
        Model("U-Net", "unet", (3, 128, 128), 4, ("down.*", "merge.*")),
        Model("GPT-2, 6 layers", "gpt2", (256,), 8, ("model.transformer.h.*",), "cross_entropy:class_axis=-1", 8192),
        Model("BERT, 6 layers", "bert", (128,), 16, ("model.bert.encoder.layer.*",), "cross_entropy:class_axis=-1", 8192),
        Model("ViT-S, 6 layers", "vit", (3, 224, 224), 8, ("blocks.*",)),
    )
}
