"""The op table: what differentiator, memory model, scheduler and verifier need to know of each operator.

One row per operator that differs from the default (a pure operator that writes new buffers).  Which buffers the kernels share was measured
on the CPU provider of version 1.19.2 (``tests/costs/test_kernel_probe.py`` measures it again): binary arithmetic, for one, is not done in
place.
"""

from __future__ import annotations

from dataclasses import dataclass

MS = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Traits:
    """What kind of operator it is.

    Attributes:
        random: draws random numbers; a second run would draw others, so it runs once.
        stateful: writes state that outlives the step; runs once.
        aliases: pairs (input, output): the output always shares the input's buffer.
        optional_outputs: outputs that the kernel does not make where nobody reads them and their name is left out.
        inplace: pairs (input, output): the output takes over the input's buffer where this is its last use and the sizes agree.
        scratch_first: its scratch memory is so many equal blocks (8 at most), allocated before its outputs; 0 for one block, allocated after them.
    """

    random: bool = False
    stateful: bool = False
    aliases: tuple[tuple[int, int], ...] = ()
    optional_outputs: tuple[int, ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    scratch_first: int = 0

    @property
    def view(self) -> bool:
        """Its only work is to show input 0's buffer under another shape."""
        return self.aliases == ((0, 0),)

    @property
    def pure(self) -> bool:
        """Equal inputs give equal outputs, with no effect beside them."""
        return not (self.random or self.stateful)


_DEFAULT = Traits()
_VIEW = Traits(aliases=((0, 0),))
_INPLACE = Traits(inplace=((0, 0),))
_RANDOM = Traits(random=True)

_TABLE: dict[tuple[str, str], Traits] = {}


def _rows(row: Traits, domain: str, names: str) -> None:
    for name in names.split():
        _TABLE[domain, name] = row


_rows(_VIEW, "", "Reshape Flatten Squeeze Unsqueeze Identity")
_rows(_INPLACE, "", "Relu LeakyRelu Elu Selu Celu Sigmoid HardSigmoid Tanh Softplus Softsign ThresholdedRelu")
_rows(_INPLACE, "", "Softmax LogSoftmax Clip Cast ScatterElements")
_rows(_RANDOM, "", "Dropout RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli")
_rows(_RANDOM, MS, "BitmaskDropout BiasDropout")
_rows(Traits(optional_outputs=(1,)), "", "MaxPool")
# What each branch gives is made by itself, then both are merged into the output.
_rows(Traits(scratch_first=2), "", "Where")
# Its statistics are written over the running ones it is fed, which is why it is fed scratch (onnxremat.normalize).
_rows(Traits(aliases=((3, 1), (4, 2))), MS, "BatchNormInternal")
_rows(Traits(stateful=True), MS, "InPlaceAccumulatorV2 AdamWOptimizer SGDOptimizerV2")


def traits(op_type: str, domain: str = "") -> Traits:
    """The row of an operator; the default row for one that has none."""
    return _TABLE.get(("" if domain == "ai.onnx" else domain, op_type), _DEFAULT)
