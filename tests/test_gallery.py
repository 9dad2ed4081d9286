"""Every lesson of the gallery, decided in exact arithmetic that does not use dobnb (tests/matrices.py)."""

from fractions import Fraction as F
from itertools import combinations

import pytest
from matrices import exact_factor, exact_kappa, exact_tv

from dobnb.gallery import GALLERY

MATRIX = {name: [list(row) for row in example.matrix] for name, example in GALLERY.items()}


def gap(A):
    half = F(1, 2)
    return half + half * exact_kappa(A) - exact_kappa(exact_factor(A, half))


def attaining(A):
    """The pairs that attain kappa, tokens counted from 1."""
    kappa = exact_kappa(A)
    return [(i + 1, j + 1) for i, j in combinations(range(len(A)), 2) if exact_tv(A[i], A[j]) == kappa]


def sides(A, i, j):
    """Whether token i, and whether token j, attends to itself at least as much as the other does to it."""
    return A[i - 1][i - 1] >= A[j - 1][i - 1], A[j - 1][j - 1] >= A[i - 1][j - 1]


def transposed(A):
    return [list(row) for row in zip(*A, strict=True)]


def mean(A, B):
    return [[(a + b) / 2 for a, b in zip(p, q, strict=True)] for p, q in zip(A, B, strict=True)]


def subchain(A, tokens):
    rows = [[A[i - 1][k - 1] for k in tokens] for i in tokens]
    return [[a / sum(row) for a in row] for row in rows]


@pytest.mark.parametrize("name", GALLERY)
def test_each_matrix_is_row_stochastic_and_round(name):
    A = MATRIX[name]
    assert all(len(row) == len(A) and sum(row) == 1 and min(row) >= 0 for row in A)
    assert all(entry.denominator <= 10 for row in A for entry in row)
    assert GALLERY[name].lesson.endswith(".") and "\n" not in GALLERY[name].lesson


def test_five_matrices_share_kappa_and_differ_in_gap():
    names = list(GALLERY)[:5]
    assert [exact_kappa(MATRIX[name]) for name in names] == [F(3, 5)] * 5
    assert [gap(MATRIX[name]) for name in names] == [0, F(3, 20), F(1, 4), F(1, 4), 0]


def test_plain():
    A = MATRIX["plain"]
    assert attaining(A) == [(1, 3)] and sides(A, 1, 3) == (True, True) and gap(A) == 0


def test_both_sides_fail():
    A = MATRIX["both sides fail"]
    assert attaining(A) == [(1, 2)] and sides(A, 1, 2) == (False, False)
    B = exact_factor(A, F(1, 2))
    assert attaining(B) == [(1, 3)]  # the pair of the smallest shortfall is the one that attains kappa of the factor


def test_one_side_fails():
    A = MATRIX["one side fails"]
    assert attaining(A) == [(1, 2)] and sides(A, 1, 2) == (False, True) and gap(A) > 0


def test_wrong_pair():
    A = MATRIX["wrong pair"]
    assert attaining(A) == [(1, 2)] and sides(A, 2, 3) == (True, True) and gap(A) > 0


def test_tie():
    A = MATRIX["tie"]
    assert attaining(A) == [(1, 2), (1, 3)] and gap(A) == 0
    assert sides(A, 1, 2) == (True, True) and sides(A, 1, 3) != (True, True)


def test_largest_in_its_row():
    A = MATRIX["largest in its row"]
    expected = [[F(2, 5), F(1, 5), F(2, 5)], [F(1, 3)] * 3, [F(1, 4), F(3, 8), F(3, 8)]]
    assert expected == A
    assert all(A[i][i] == max(A[i]) for i in range(3)) and gap(A) > 0


def test_symmetric():
    A = MATRIX["symmetric"]
    assert transposed(A) == A and gap(A) == exact_kappa(A) == F(4, 5)  # 200% of kappa / 2


def test_all_but_oneself():
    A = MATRIX["all but oneself"]
    assert all(A[i][k] == (0 if i == k else F(1, 2)) for i in range(3) for k in range(3))
    assert gap(A) == exact_kappa(A) == F(1, 2)


def test_transpose():
    A = MATRIX["transpose"]
    assert all(sum(row) == 1 for row in transposed(A))
    assert gap(A) == 0 and gap(transposed(A)) == F(1, 20)


def test_rings():
    three, four = MATRIX["three in a ring"], MATRIX["four in a ring"]
    assert all(A[i][(i + 1) % len(A)] == 1 for A in (three, four) for i in range(len(A)))
    assert gap(three) > 0 and gap(transposed(three)) > 0
    assert gap(four) == gap(transposed(four)) == 0 and gap(mean(four, transposed(four))) > 0


def test_left_and_right_head():
    left, right = MATRIX["left head"], MATRIX["right head"]
    renamed = (0, 2, 1)
    assert right == [[left[i][k] for k in renamed] for i in renamed]
    assert gap(left) > 0 and gap(right) > 0 and gap(mean(left, right)) == 0 < exact_kappa(mean(left, right))


def test_causal():
    A = MATRIX["causal"]
    assert all(A[i][k] == 0 for i in range(3) for k in range(i + 1, 3)) and gap(A) == 0
    assert sides(A, 2, 3) != (True, True)  # not every pair is: token 1 decides


def test_special_tokens():
    helps, hurts = MATRIX["special token helps"], MATRIX["special token hurts"]
    content = subchain(helps, [2, 3])
    assert gap(helps) == 0 and gap(content) == exact_kappa(content) > 0
    assert gap(hurts) > 0 and attaining(hurts)[0][0] == 1
    assert subchain(hurts, [2, 3]) == [[1, 0], [0, 1]]
