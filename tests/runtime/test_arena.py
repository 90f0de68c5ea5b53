"""The registered arena, where it is larger than the runtime can name in one number."""

from __future__ import annotations

from onnxremat.runtime import worker

MIB = 2**20


def large_job(capacity: int, nbytes: int) -> dict[str, int | str]:
    """In a worker: claim an arena, then ask for one buffer of so many bytes; how far the process grew at each of the two."""
    import numpy as np

    from onnxremat.errors import OutOfBudget
    from onnxremat.runtime import arena
    from onnxremat.runtime.memory import resident_bytes
    from onnxremat.runtime.session import BoundSession, make_session

    before = resident_bytes()
    arena.register(capacity)
    claimed = resident_bytes() - before
    bound = BoundSession(make_session(arena.claim_model(nbytes).SerializeToString()), outputs=["block"])
    bound.bind({"shape": np.array([nbytes // 1024, 256], np.int64)})
    try:
        bound.run_discarding()
    except OutOfBudget as error:
        return {"claimed": claimed, "error": str(error)}
    return {"claimed": claimed, "grown": resident_bytes() - before}


def test_an_arena_beyond_two_gibibytes_is_one_region() -> None:
    capacity = 2048 * MIB + 512 * MIB
    found = worker.call("tests.runtime.test_arena:large_job", capacity=capacity, nbytes=capacity - MIB)
    assert found["claimed"] < 128 * MIB, "what is claimed is not resident"
    assert capacity - 8 * MIB < found["grown"] < capacity + 128 * MIB
    refused = worker.call("tests.runtime.test_arena:large_job", capacity=capacity, nbytes=capacity + MIB)
    assert "exceeds the memory" in refused["error"]
