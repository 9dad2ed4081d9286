"""Rational stochastic matrices for the property tests, and the mathematics on them in exact arithmetic.

Nothing here uses dobnb: it is the independent implementation that the package is compared with.
"""

from fractions import Fraction

from hypothesis import strategies as st

# Small numerators over a common denominator: ties, zeros, ones and repeated rows are frequent, not rare.
ENTRIES = st.one_of(st.integers(0, 3), st.integers(0, 1000), st.just(0))


@st.composite
def rational_matrices(draw, smallest=2, largest=12):
    """A row-stochastic matrix of Fractions, N from `smallest` to `largest`."""
    n = draw(st.integers(smallest, largest))
    rows = []
    for i in range(n):
        if i and draw(st.integers(0, 4)) == 0:
            rows.append(rows[draw(st.integers(0, i - 1))])
            continue
        weights = draw(st.lists(ENTRIES, min_size=n, max_size=n))
        if not any(weights):
            weights[draw(st.integers(0, n - 1))] = 1
        rows.append([Fraction(w, sum(weights)) for w in weights])
    return rows


def as_floats(A):
    return [[float(a) for a in row] for row in A]


def exact_tv(p, q):
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def exact_factor(A, alpha):
    return [[(1 - alpha) * a + (alpha if i == j else 0) for j, a in enumerate(row)] for i, row in enumerate(A)]


def exact_kappa(A):
    return max(exact_tv(A[i], A[j]) for i in range(len(A)) for j in range(i))
