"""A comparison with torch where both sides see the same dropout masks and random numbers: those that ONNX Runtime drew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from .errors import OnnxRematError

Array = npt.NDArray[Any]


class NotComparable(OnnxRematError):
    """The model draws random numbers that can't be handed to torch."""


def _as_drawn(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _normal(value: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Any:
    """The graph draws standard numbers for a mean or deviation that is a tensor, and shifts and scales them afterwards."""
    return value if isinstance(mean, float) and isinstance(std, float) else value * std + mean


def _bernoulli(value: Any, x: Any, p: Any = None, **kwargs: Any) -> Any:
    """1 where a uniform number lies below the probability: the element itself, or one of its own."""
    return (value < (x if p is None else p)).to(value.dtype)


def _bernoulli_in_place(value: Any, x: Any, p: float = 0.5, **kwargs: Any) -> Any:
    return _bernoulli(value, x, p)


def _exponential(value: Any, x: Any, lambd: float = 1.0, **kwargs: Any) -> Any:
    return value.log() / -lambd


#: Function of torch -> what makes its result of the numbers in the graph and of its own arguments.
_DRAWS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "uniform_", "normal_"), _as_drawn),
    "normal": _normal,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "exponential_": _exponential,
}
#: Functions whose numbers the graph draws in another form, or not at all.
_UNLIKE = (
    *("randint", "randint_like", "randperm", "multinomial", "poisson", "geometric_", "log_normal_", "cauchy_", "random_"),
    *("rrelu", "alpha_dropout", "feature_alpha_dropout"),
)


@contextmanager
def given_draws(masks: Sequence[Array], values: Sequence[Array] = ()) -> Iterator[None]:
    """Within the block torch's dropouts use these masks, and its random functions these values, in the order in which they are called.

    Args:
        masks: of each dropout, True where an element is kept.
        values: of each operator that draws numbers, as the graph has them: uniform or normal ones.

    Raises:
        NotComparable: torch draws more or less, in other shapes, or by a function whose numbers are not the graph's.
    """
    import torch
    import torch.nn.functional as F
    from torch.overrides import TorchFunctionMode

    from .exporters.checkpoints import whole_checkpoints
    from .exporters.functional_recurrent import visible_dropouts

    pending, drawn = ([torch.from_numpy(np.array(a)) for a in arrays] for arrays in (masks, values))

    def drop(x: Any, p: float) -> Any:
        if not pending:
            raise NotComparable("torch calls more dropouts than the graph has")
        mask = pending.pop(0)
        # A channel's dropout has a mask of its own rank; any other mask has its input's elements.
        return x * mask.to(x.dtype).reshape(mask.shape if mask.ndim == x.ndim else x.shape) / (1 - p)

    class Masks(TorchFunctionMode):  # type: ignore[misc]  # torch's types are not followed
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(func, "__name__", "")
            if name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"):
                x = args[0] if args else kwargs.get("input")
                p = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
                training = bool(args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True)))
                if not training or p == 0:
                    return x
                inplace = bool(args[3] if len(args) > 3 else kwargs.get("inplace", False))
                return x.copy_(drop(x, p)) if inplace else drop(x, p)
            if name == "scaled_dot_product_attention":
                return attention(func, args, kwargs)
            if name == "gumbel_softmax":
                with patch.object(torch.Tensor, "exponential_", inner_exponential):
                    return func(*args, **kwargs)
            if name == "multi_head_attention_forward":
                # A mode is not active inside the functions that it is shown, and this one calls dropouts of its own.
                with patch.object(F, "dropout", inner_dropout), patch.object(F, "scaled_dot_product_attention", inner_attention):
                    return func(*args, **kwargs)
            if name in _DRAWS or name in _UNLIKE:
                return draw(name, func, args, kwargs)
            return func(*args, **kwargs)

    def draw(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        like = func(*args, **kwargs).clone()  # torch knows shape and dtype best; in place, its numbers are written over
        if name not in _DRAWS or not drawn:
            raise NotComparable(f"the model draws random numbers by torch.{name}, which can't be compared")
        value = drawn.pop(0).to(like.dtype)
        if value.shape != like.shape:
            raise NotComparable(f"torch.{name} draws {tuple(like.shape)}, the graph {tuple(value.shape)}")
        value = _DRAWS[name](value, *args, **kwargs)
        return args[0].copy_(value) if name.endswith("_") else value

    def attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        p = float(values.get("dropout_p") or 0.0)
        if p == 0:
            return func(*args, **kwargs)
        query, key, value = values["query"], values["key"], values["value"]
        if values.get("enable_gqa"):
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scale = values.get("scale") or query.shape[-1] ** -0.5
        scores = query @ key.transpose(-2, -1) * scale
        if values.get("is_causal"):
            keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~keep, float("-inf"))
        mask = values.get("attn_mask")
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
        weights = F.softmax(scores, -1)
        if mask is not None and mask.dtype == torch.bool:
            weights = weights * mask.any(-1, keepdim=True)  # a row without a single True attends to nothing
        return drop(weights, p) @ value

    def inner_dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return drop(x, p) if training and p > 0 else x

    def inner_exponential(x: Any, lambd: float = 1.0, **kwargs: Any) -> Any:
        return draw("exponential_", exponential, (x, lambd), kwargs)

    def inner_attention(*args: Any, **kwargs: Any) -> Any:
        return attention(scaled_dot_product_attention, args, kwargs)

    exponential = torch.Tensor.exponential_
    scaled_dot_product_attention = F.scaled_dot_product_attention
    # A region that is recomputed in the backward pass would call its dropouts a second time.
    with whole_checkpoints(), visible_dropouts(), Masks():
        yield
    if pending:
        raise NotComparable(f"the graph has {len(pending)} dropouts more than torch calls")
    if drawn:
        raise NotComparable(f"the graph draws {len(drawn)} times more than torch")
