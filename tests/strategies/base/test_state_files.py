"""Files of states: read back as they were written, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from damage import damaged
from failing import fails
from resuming import assert_resumes
from tiny import SHORT, comparable, federate, same
from two_layers import losing

from partitions.common.files import write_atomically
from strategies.base.state import State, bytes_of, map_arrays, write_sealed

NUMBERS = {
    "round": 3,
    "best_accuracy": 0.1 + 0.2,
    "name": "hospital-01 ä",
    "none": None,
    "own": [1, "a"],
}


def some_state():
    noise = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    return State(
        {"personal": noise, "best": noise, "count": torch.arange(7), "empty": noise[:0]},
        dict(NUMBERS),
    )


@pytest.fixture
def file(tmp_path):
    some_state().save(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


def test_a_file_is_read_as_it_was_written_and_by_any_reader(file):
    """An ordinary safetensors file; the same state gives the same bytes."""
    state, read = some_state(), State.load(file)
    assert read.numbers == NUMBERS and read.arrays.keys() == state.arrays.keys()
    assert all(same(read.arrays[name], tensor) for name, tensor in state.arrays.items())
    plain = safetensors.torch.load_file(file)
    assert state.arrays.keys() - plain.keys() == {"best"}  # it is the last one
    assert all(same(plain[name], state.arrays[name]) for name in plain)
    some_state().save(file.with_name("again"))
    assert file.read_bytes() == file.with_name("again").read_bytes()
    # As torch has them: sums are the same
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read.arrays.values())


def test_equal_arrays_are_in_a_file_once(tmp_path):
    """Equal bit for bit, in type and shape, also with a value that is no number; a file of another kind is refused."""
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    inside, odd = noise.clone(), torch.tensor([0.0, float("nan")])
    inside[500] += 1
    arrays = {"a": noise, "b": noise.clone(), "personal": noise.clone(), "inside": inside}
    arrays |= {"view": noise.view(10, 100), "odd": odd, "too": odd.clone(), "less": -odd}
    arrays |= {"whole": noise.view(torch.int32)}
    file = tmp_path / "state.safetensors"
    State(arrays).save(file)
    kept = safetensors.torch.load_file(file).keys()
    assert kept == {"personal", "inside", "view", "odd", "less", "whole"}
    for read in (State.load(file).arrays, map_arrays(file, arrays)):
        assert read.keys() == arrays.keys()
        for name, array in arrays.items():
            assert read[name].dtype == array.dtype and read[name].shape == array.shape
            assert torch.equal(bytes_of(read[name]), bytes_of(array)), name
    for text in ('["a"]', '{"b": "none"}', '{"b": ["a"]}', '{"b": {}}', "3", "null", "{"):
        write_sealed(file, {"a": noise}, {"same": text})
        fails(ValueError, "cannot be read", State.load, file)


def test_none_of_100_damaged_files_is_read(file):
    for what, data in damaged(file.read_bytes(), 100):
        file.write_bytes(data)
        said = fails(ValueError, "cannot be read", State.load, file)
        assert str(file) in said, what


def test_no_bit_of_the_header_can_change(file):
    data = file.read_bytes()
    for bit in range(8 * (8 + int.from_bytes(data[:8], "little"))):
        copy = bytearray(data)
        copy[bit // 8] ^= 1 << bit % 8
        file.write_bytes(copy)
        fails(ValueError, "cannot be read", State.load, file)


def test_a_file_that_grew_is_not_read(file):
    file.write_bytes(file.read_bytes() + b"\0")
    fails(ValueError, "its SHA-256 is not the one that was written", State.load, file)


def test_what_is_no_state_is_one_clear_error(tmp_path):
    """Nor is a file without a seal, with the same header otherwise."""
    texts = ({"format": "pt"}, {"numbers": json.dumps(NUMBERS)})
    files = [safetensors.torch.save({"w": torch.ones(3)}, metadata=text) for text in texts]
    for data in (b"", b"\0" * 20, b"\xff" * 200, *files):
        (tmp_path / "x").write_bytes(data)
        fails(ValueError, "x cannot be read: it is damaged", State.load, tmp_path / "x")


def test_the_file_of_before_stays_until_the_new_one_is_written(tmp_path):
    """A disk that is full, a crash in the middle: what was there is still there, under its own name."""
    new, before = tmp_path / "new", tmp_path / "before"
    write_atomically(new, "1", keep=before)
    assert not before.exists()
    write_atomically(new, "2", keep=before)
    assert (new.read_text(), before.read_text()) == ("2", "1")

    def fail(temporary):
        raise OSError("no space left on device")

    fails(OSError, "no space", write_atomically, new, fail, keep=before)
    assert (new.read_text(), before.read_text()) == ("2", "1") and len(
        list(tmp_path.iterdir())
    ) == 2


COUNTING: dict[str, Any] = {
    "fedadmm": {"fedadmm__rho": 0.2},
    "fedcac": {},
    "feddyn": {"feddyn__alpha": 0.2},
    "scaffold": {"scaffold__up": "both"},
    "scaffold, the model alone": {"scaffold__up": "model"},
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_resumed_run_knows_what_was_counted(three, tmp_path, name):
    """c's reply of round 3, after which the run breaks off, was left out: resumed, c trains with its round 2."""
    settings = {**SHORT, "rounds": 5, "learning_rate": 0.2}
    options = {**settings, "strategy": name.partition(",")[0], **COUNTING[name]}
    whole = assert_resumes(three, tmp_path, 3, **options, prepare=losing(("c", 3)))
    assert comparable(federate(three, **options).rows) != comparable(whole.rows)
