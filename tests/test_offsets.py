"""Offline offset assignment: against brute force, the compiled search beside its twin, and the checker by itself."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.placement import Buffer, OverlappingBuffers, assign_offsets, check_offsets, live_bytes
from onnxremat.placement.offsets import CUT, FAILED, FOUND, Cliques, compiled, first_fit, native_dive, twin_dive


def tight_instance(rng: random.Random, height: int, span: int, cuts: int) -> list[Buffer]:
    """A rectangle of time and memory cut into buffers without waste: it can be packed into ``height``, and no lower."""
    pieces = [(0, span, 0, height)]
    for _ in range(cuts):
        i = rng.randrange(len(pieces))
        t0, t1, low, high = pieces[i]
        if rng.random() < 0.5 and t1 - t0 > 1:
            t = rng.randrange(t0 + 1, t1)
            pieces[i : i + 1] = [(t0, t, low, high), (t, t1, low, high)]
        elif high - low > 1:
            at = rng.randrange(low + 1, high)
            pieces[i : i + 1] = [(t0, t1, low, at), (t0, t1, at, high)]
    rng.shuffle(pieces)
    return [Buffer(t0, t1 - 1, high - low) for t0, t1, low, high in pieces]


def least_bytes(buffers: list[Buffer]) -> int:
    """By brute force: some order gives a best placement when each buffer takes the lowest offset above what it meets."""
    cliques = Cliques.of(buffers)
    orders = itertools.permutations(range(len(buffers)))
    return min(max(o + b.bytes for o, b in zip(first_fit(cliques, order), buffers, strict=True)) for order in orders)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=6))
def test_the_least_memory_by_brute_force(rows: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(first, first + length, size) for first, length, size in rows]
    found = assign_offsets(buffers, seconds=5)
    assert found.live_bytes == live_bytes(buffers) <= found.bytes == least_bytes(buffers)
    assert found.proven_bytes <= found.bytes


@pytest.mark.parametrize("seed", range(4))
def test_packs_without_waste(seed: int) -> None:
    rng = random.Random(seed)
    buffers = tight_instance(rng, 4096, 60, 50)
    found = assign_offsets(buffers, seconds=30)
    assert found.bytes == found.live_bytes == 4096
    assert any(first_fit(Cliques.of(buffers), range(len(buffers))))  # the offsets are not all 0


def test_too_little_room_is_proven() -> None:
    buffers = tight_instance(random.Random(5), 64, 12, 12)
    cliques = Cliques.of(buffers)
    assert twin_dive(cliques)(63, list(range(len(buffers))), 1, [0] * cliques.count, 10**6)[0] == FAILED
    assert assign_offsets(buffers, 65).bytes <= 65


@pytest.mark.parametrize("seed", range(12))
def test_the_twin_decides_alike(seed: int) -> None:
    library = compiled()
    if library is None:
        pytest.skip("installed without the compiled search")
    rng = random.Random(seed)
    buffers = tight_instance(rng, 512, 24, 26)
    cliques = Cliques.of(buffers)
    twin, native = twin_dive(cliques), native_dive(library, cliques)
    endings = set()
    for capacity, weight, limit in itertools.product((500, 512, 530), (1, 2), (3, 40, 400)):
        order = rng.sample(range(len(buffers)), len(buffers))
        noise = [rng.randrange(40) for _ in range(cliques.count)]
        ours, theirs = (dive(capacity, order, weight, noise, limit) for dive in (twin, native))
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])
        endings.add(ours[0])
        if ours[0] == FOUND:
            assert ours[1] == theirs[1]
            check_offsets(buffers, ours[1], capacity)
    assert endings >= {CUT, FAILED}


def test_empty_buffers_and_none() -> None:
    assert assign_offsets([]).bytes == 0
    found = assign_offsets([Buffer(0, 3, 0), Buffer(1, 2, 8), Buffer(0, 3, 0)])
    assert (found.bytes, found.live_bytes) == (8, 8)


@pytest.mark.parametrize(
    ("offsets", "capacity", "message"),
    [
        ([0, 4, 0], 12, None),
        ([0, 3, 0], 12, "buffers 0 and 1"),
        ([0, 9, 0], 12, "outside"),
        ([-1, 4, 0], 12, "outside"),
        ([0, 4], 12, "2 offsets for 3 buffers"),
        ([0, 4, 5], 12, "buffers 1 and 2"),
    ],
)
def test_the_checker(offsets: list[int], capacity: int, message: str | None) -> None:
    buffers = [Buffer(0, 2, 4), Buffer(2, 5, 4), Buffer(3, 4, 4)]
    if message is None:
        check_offsets(buffers, offsets, capacity)
    else:
        with pytest.raises(OverlappingBuffers, match=message):
            check_offsets(buffers, offsets, capacity)
