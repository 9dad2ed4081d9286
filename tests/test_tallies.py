"""Tallies add like exact numbers, and what is read back is what was written or refused."""

import io
import pickle
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dobnb.tallies import Tallies, TallyError, on_grids


def made(first, n, totals, roles=("cls", "content", "content")):
    """Tallies of n inputs of one layer, with sums of the user's choice."""
    numbers = np.random.default_rng(first)
    by_input = {f"content_{what}": numbers.random((n, 1)) for what in ("kappa", "margin", "gap")}
    by_input["content_holds"] = numbers.random((n, 1)) < 0.5
    return Tallies(np.arange(first, first + n), by_input, roles, on_grids(totals), 1.0, frozenset([f"machine {first}"]))


def same(a, b):
    """Bit for bit, but for the seconds."""
    arrays = [(a.inputs, b.inputs)] + [(a.by_input[name], b.by_input[name]) for name in a.by_input | b.by_input]
    arrays += [] if a.sums is None or b.sums is None else [(a.sums, b.sums)]
    alike = (a.roles, a.origins, a.sums is None) == (b.roles, b.origins, b.sums is None)
    return alike and all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in arrays)


@given(st.lists(st.floats(0, 64), min_size=1, max_size=40), st.randoms())
def test_sums_of_blocks_do_not_depend_on_their_order_and_are_exact(totals, random):
    """Against rational arithmetic: each block is off by at most 2**-73, adding by nothing."""
    blocks = [on_grids(np.array([total])) for total in totals]
    one_way = sum(blocks, np.zeros((2, 1)))
    shuffled = list(blocks)
    random.shuffle(shuffled)
    half = len(shuffled) // 2
    other_way = sum(shuffled[half:], np.zeros((2, 1))) + sum(shuffled[:half], np.zeros((2, 1)))
    assert one_way.tobytes() == other_way.tobytes()
    found = sum(Fraction(part) for part in one_way.ravel().tolist())
    assert abs(found - sum(map(Fraction, totals))) <= len(totals) * Fraction(1, 2**73)


def test_plain_float64_sums_do_depend_on_the_order():
    """So the grids are not for nothing."""
    totals = np.random.default_rng(0).random(100)
    assert sum(totals) != sum(totals[::-1])


def test_tallies_are_a_commutative_monoid_to_the_last_bit():
    numbers = np.random.default_rng(5)
    parts = [made(first, n, 32 * numbers.random((1, 3, 3))) for first, n in ((0, 4), (4, 1), (5, 7))]
    whole = (parts[0] + parts[1]) + parts[2]
    for a, b, c in permutations(parts):
        assert same(a + (b + c), whole) and same((a + b) + c, whole)
    assert whole.inputs.tolist() == list(range(12)) and whole.seconds == 3.0
    assert whole.origins == {"machine 0", "machine 4", "machine 5"}


def test_inputs_of_different_tokens_have_no_sum_in_any_order():
    long = made(4, 2, np.ones((1, 4, 4)), ("cls", "content", "content", "content"))
    parts = [made(0, 4, np.ones((1, 3, 3))), long, made(6, 1, np.ones((1, 3, 3)))]
    for a, b, c in permutations(parts):
        left, right = (a + b) + c, a + (b + c)
        assert same(left, right) and left.sums is None and left.roles is None and left.averaged() is None


def test_what_does_not_add_is_refused():
    one = made(0, 4, np.ones((1, 3, 3)))
    with pytest.raises(TallyError, match="input 3 is in both"):
        one + made(3, 4, np.ones((1, 3, 3)))
    other = made(4, 4, np.ones((1, 3, 3)))
    other.by_input["heads_holds"] = np.ones((4, 1, 2), dtype=bool)
    with pytest.raises(TallyError, match="different layers, heads or tests"):
        one + other
    with pytest.raises(TypeError):
        one + 1


@pytest.mark.parametrize("summed", [True, False])
def test_a_file_gives_back_every_bit(summed):
    one = made(3, 5, np.random.default_rng(2).random((2, 3, 3)))
    if not summed:
        one = Tallies(one.inputs, one.by_input, None, None, one.seconds, one.origins)
    file = io.BytesIO()
    one.write(file, "run 1")
    back = Tallies.read(file.getvalue(), "run 1")
    assert same(back, one) and back.seconds == one.seconds
    with pytest.raises(TallyError, match="other settings"):
        Tallies.read(file.getvalue(), "run 2")


class Burglar:
    def __reduce__(self):
        return (pytest.fail, ("code out of a file was run",))


def test_a_file_cannot_run_code():
    """numpy writes objects as pickles; reading one would call `pytest.fail`."""
    file = io.BytesIO()
    np.savez(file, inputs=np.array([Burglar()], dtype=object), fingerprint=np.array("run 1"))
    with pytest.raises(TallyError, match="holds no tallies"):
        Tallies.read(file.getvalue(), "run 1")
    with pytest.raises(TallyError, match="holds no tallies"):
        Tallies.read(pickle.dumps(Burglar()), "run 1")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x93NUMPY\x01\x00"])
def test_other_content_is_refused(content):
    with pytest.raises(TallyError, match="holds no tallies"):
        Tallies.read(content, "run 1")
