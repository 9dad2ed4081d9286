"""One pass over the pairs of rows, on the CPU: an integer screen that may only rule pairs out, float64 for the rest.

It returns what :func:`dobnb.equality.check_equality`, :func:`dobnb.dobrushin.dobrushin_coefficient` and
:func:`dobnb.dobrushin.leave_one_out` report, by their one definition (book: def-kappa-float).

The screen. Let ``r_ik`` be the renormalised float64 rows, ``m_i`` their sums, and ``q_ik = ceil(2**31 r_ik)``. For a
pair of rows, ``TV_ij = (m_i + m_j) / 2 - sum_k min(r_ik, r_jk)``, because ``|x - y| = x + y - 2 min(x, y)``. Put
``S_ij = sum_k min(q_ik, q_jk)``. As ceil is monotone, ``min(q_ik, q_jk) = ceil(2**31 min(r_ik, r_jk))``; such a term
exceeds its real value by less than 1, by 0 where that is 0, and is at least 1 elsewhere. So at most ``min(S_ij, N)``
terms are too large, each by less than 1, and with ``u = 2**-31``::

    lower_ij = (m_i + m_j) / 2 - u S_ij   <=   TV_ij   <=   lower_ij + u min(S_ij, N)

``S_ij`` is at most ``2**31 (1 + 1e-6) + N``, so 32 bits hold it, and integers add up to the same in any order. At
``S_ij = 0`` both bounds agree: rows with disjoint support, the ties that saturated attention is full of, need no
settling. Float64 rounding, in the bounds and in what they are compared with, is below ``N 2**-50``, which `slop` adds.

What follows. A pair whose upper bound is below the largest lower bound less `ATTAINS` does not attain kappa; the others
are settled: half the L1 distance of the float64 rows. With kappa and the verdict known, the gap and the margin are
minima over pairs of functions that move by no more than TV and a dominance slack do. The estimate of a pair takes
`lower_ij` for TV and ``u q_ji`` for ``A_ji``, so it is at most ``u N + u`` too large or ``u`` too small; pairs whose
estimate exceeds the least one by more than ``u (N + 2)`` cannot be the minimum, the others are settled in float64
unless a bound of their own exceeds the best value found so far.

Where more than about ``N**2 / 40`` pairs would need settling, which a few rows of the screen often tell, the same code
runs on ``ceil(2**62 r_ik)`` in 64 bits, whose error, below ``N 2**-62``, is far less than float64's own. For small N a
screen does not pay: vectors hold an entry of many matrices each, and every pair is settled in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from dobnb.lanes import LANES, ROWS, choose, every, get, least, magnitude, most, put, tile

ATTAINS = 1e-12
"""A pair attains kappa when its float64 total variation is within this of the maximum: rounding in a sum of N terms is
about N * 1e-16, so ties of exact arithmetic stay ties."""

KAPPA, REPORT, SCORES = 0, 1, 2
"""What is asked for: kappa and who attains it; also gap and margin; or also leave-one-out scores."""

_SMALL = 40
"""Up to this N a screen does not pay: every pair in float64, many matrices side by side."""

_ROUNDING = 1e-15
_UNIT32, _UNIT64 = 2.0**-31, 2.0**-62


class Found(NamedTuple):
    """What :func:`pairs_of_rows` found, by matrix. NumPy arrays, B the size of the batch."""

    kappa: np.ndarray
    """float64, (B,)."""
    gap: np.ndarray
    """float64, (B,); 0 where `holds`; NaN unless asked for."""
    margin: np.ndarray
    """float64, (B,); NaN unless asked for."""
    holds: np.ndarray
    """bool, (B,)."""
    pair: np.ndarray
    """int64, (B, 2)."""
    attaining: np.ndarray
    """int64, (B,)."""
    scores: np.ndarray
    """float64, (B, n); (0, n) unless asked for."""


def _compiled(**options: Any) -> Callable[[Callable], Callable]:
    """Compile at the first call, without the interpreter's lock, and keep the code for the next process.

    It is kept beside this file or, where that folder is read-only, in the user's cache; if neither can be written,
    every process compiles for itself.
    """

    def decorate(function: Callable) -> Callable:
        try:
            return njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except RuntimeError:
            return njit(nogil=True, error_model="numpy", **options)(function)

    return decorate


@_compiled(fastmath={"reassoc", "nsz"})
def _mass(row):
    """The sum of a row in float64 and whether an entry is negative. NaN and infinity make the sum so."""
    total, negative = 0.0, 0
    for k in range(row.size):
        total += np.float64(row[k])
        negative += row[k] < 0
    return total, negative > 0


@_compiled(fastmath={"reassoc", "nsz"})
def _half_l1(p, q):
    """Half the L1 distance of two rows, at most 1."""
    total = 0.0
    for k in range(p.size):
        total += abs(p[k] - q[k])
    return min(0.5 * total, 1.0)


@_compiled()
def _scale(row, by):
    for k in range(row.size):
        row[k] /= by


@_compiled()
def _copy(source, row):
    for k in range(row.size):
        row[k] = source[k]


@_compiled()
def _load(raw, index, run, stochastic, tolerance, R, masses):
    """Fill R with the rows as the definition has them, restricted to `index` if there is one. False: bad input.

    `run`: the tokens of `index` are neighbours, in order, so that rows are copied and not gathered.
    """
    n, kept = R.shape[0], index.size > 0
    for i in range(raw.shape[0]):
        total, negative = _mass(raw[i])
        if negative or not (abs(total - 1.0) <= tolerance if stochastic else total <= 1.0 + tolerance):
            return False
        masses[i if not kept else 0] = total
    for i in range(n):
        row = R[i]
        if not kept:
            _copy(raw[i], row)
        else:
            source = raw[index[i]]
            if run:
                _copy(source[index[0] : index[0] + n], row)
            else:
                for k in range(n):
                    row[k] = source[index[k]]
            masses[i], _ = _mass(row)
            if masses[i] == 0.0:
                return False
        if (stochastic or kept) and abs(masses[i] - 1.0) > n * 2.0**-52:
            _scale(row, masses[i])
            masses[i] = 1.0
            if kept:  # what is left of a row may be small, so that one division is not enough
                mass, _ = _mass(row)
                if abs(mass - 1.0) > n * 2.0**-52:
                    _scale(row, mass)
    return True


@_compiled()
def _fill(R, scale, panels):
    """``panels[b, k, c] = ceil(scale R[16 b + c, k])``, 0 beyond the last row: 16 rows side by side, by column."""
    n = R.shape[0]
    for b in range(n // LANES):
        block, panel = R[b * LANES : (b + 1) * LANES], panels[b]
        for k in range(n):
            for c in range(LANES):
                panel[k, c] = np.int64(math.ceil(scale * block[c, k]))
    for b in range(n // LANES, panels.shape[0]):
        block, panel = R[b * LANES :], panels[b]
        panel[:] = 0
        for k in range(n):
            for c in range(block.shape[0]):
                panel[k, c] = np.int64(math.ceil(scale * block[c, k]))


@_compiled()
def _sum_minima(panels, S, first, last):
    """S[i, j] for all i < j (and what else lies in their tiles) where i is in blocks of rows `first` to `last`."""
    for columns in range(panels.shape[0]):
        for rows in range(first, min(2 * columns + 2, last)):
            tile(panels, np.int64(rows), np.int64(columns), S)


@_compiled()
def _least(values):
    """The least of numbers that are at least 0, whose bits are ordered as they are: integers reduce as vectors."""
    bits = values.view(np.int64)
    least = bits[0]
    for k in range(bits.size):
        least = min(least, bits[k])
    return np.int64(least).view(np.float64)


@_compiled()
def _largest_lower(S_row, h, h_i, unit, line):
    """The largest lower bound of a row's pairs; -1 for no pair."""
    n = S_row.size
    if n == 0:
        return -1.0
    line = line[:n]
    for j in range(n):
        line[j] = 2.0 - (h_i + h[j] - unit * S_row[j])
    return min(2.0 - _least(line), 1.0)


@_compiled()
def _column(panels, i, unit, down):
    """``down[j] = A_ji`` for j > i, within a unit."""
    for b in range((i + 1) // LANES, panels.shape[0]):
        for c in range(LANES):
            down[b * LANES + c] = unit * panels[b, i, c]


@_compiled()
def _margins(S_row, h, h_i, unit, own, own_i, across, down, kappa, sign, margins):
    """An estimate of each margin in a row of pairs: ``across[j] = A_ij``, ``down[j] = A_ji``, ``own[j] = A_jj``."""
    for j in range(S_row.size):
        below = kappa - (h_i + h[j] - unit * S_row[j])
        below = below if below > 0.0 else 0.0
        over_i, over_j = own_i - down[j], own[j] - across[j]
        slack = sign * (over_i if over_i < over_j else over_j)
        margins[j] = slack if slack > below else below


@_compiled()
def _gaps(S_row, h, h_i, unit, own, own_i, across, down, kappa, alpha, gaps):
    """An estimate of each gap in a row of pairs."""
    for j in range(S_row.size):
        below = kappa - (h_i + h[j] - unit * S_row[j])
        below = below if below > 0.0 else 0.0
        loss_i, loss_j = (alpha - 1.0) * (own_i - down[j]), (alpha - 1.0) * (own[j] - across[j])
        loss_i = loss_i if loss_i > 0.0 else 0.0
        loss_j = loss_j if loss_j > 0.0 else 0.0
        gaps[j] = (1.0 - alpha) * below + (loss_i if loss_i < alpha else alpha) + (loss_j if loss_j < alpha else alpha)


@_compiled()
def _bounds(S, h, unit, i, j, exact):
    """Lower and upper bound of TV_ij; the same where the pair needs no settling."""
    s = S[i, j]
    lower = max(h[i] + h[j] - unit * s, 0.0) if exact else h[i] + h[j] - unit * s
    upper = lower if exact else lower + unit * min(s, h.size)
    return min(lower, 1.0), min(upper, 1.0)


@_compiled()
def _count_unsettled(S_row, h, h_i, unit, most, threshold):
    """How many pairs of a row float64 may have to settle, at most: as `_bounds`, without a branch."""
    many = 0
    for j in range(S_row.size):
        wide = np.float64(S_row[j])
        upper = h_i + h[j] - unit * wide + unit * (wide if wide < most else most)
        many += 1 if (upper >= threshold - _ROUNDING) & (wide > 0.0) else 0
    return many


@_compiled()
def _unresolved(S, h, unit, line):
    """How many pairs of the first block of rows the screen cannot tell from those that attain its largest distance."""
    n, best, many = h.size, -1.0, 0
    for i in range(ROWS):
        best = max(best, _largest_lower(S[i, i + 1 : n], h[i + 1 :], h[i], unit, line))
    for i in range(ROWS):
        many += _count_unsettled(S[i, i + 1 : n], h[i + 1 :], h[i], unit, np.float64(n), best - ATTAINS)
    return many


@_compiled()
def _without(S, h, unit, exact, R, x, slop, row_best, line, limit):
    """The largest total variation of pairs without token x, 0 if there are none; -1: too many to settle."""
    n = h.size
    best = -1.0
    for i in range(n - 1):
        row_best[i] = -1.0
        if i != x:
            row_best[i] = _largest_lower(S[i, i + 1 : max(x, i + 1)], h[i + 1 : max(x, i + 1)], h[i], unit, line)
            start = max(x, i) + 1
            row_best[i] = max(row_best[i], _largest_lower(S[i, start:n], h[start:], h[i], unit, line))
        best = max(best, row_best[i])
    wide = 0.0 if exact else unit * n
    threshold, found, settled = best - slop, 0.0, 0
    for i in range(n - 1):
        if i == x or row_best[i] + wide < threshold:
            continue
        for j in range(i + 1, n):
            if j == x:
                continue
            lower, upper = _bounds(S, h, unit, i, j, exact)
            if upper < threshold or upper <= found:
                continue
            if lower < upper:
                settled += 1
                if settled > limit:
                    return -1.0
                lower = _half_l1(R[i], R[j])
            found = max(found, lower)
    return found


@_compiled()
def _evaluate(S, panels, h, unit, exact, R, what, alpha, limit, scratch, numbers, counts, scores):
    """Everything that is asked of one matrix, from the bounds. False: more pairs than `limit` would need settling.

    With `exact`, bounds are values.
    """
    row_best, row_gap, own, down, lines, tvs = scratch
    n = h.size
    slop = n * 2.0**-50
    wide = 0.0 if exact else unit * n
    # Who may attain kappa.
    best = -1.0
    for i in range(n - 1):
        row_best[i] = _largest_lower(S[i, i + 1 : n], h[i + 1 :], h[i], unit, lines[0])
        best = max(best, row_best[i])
    threshold = best - ATTAINS - slop
    if not exact:
        many = 0
        for i in range(n - 1):
            if row_best[i] + wide >= threshold:
                many += _count_unsettled(S[i, i + 1 : n], h[i + 1 :], h[i], unit, np.float64(n), threshold)
        if many > limit:
            return False
    kappa, settled = 0.0, 0
    for i in range(n - 1):
        if row_best[i] + wide < threshold:
            continue
        for j in range(i + 1, n):
            lower, upper = _bounds(S, h, unit, i, j, exact)
            if upper < threshold:
                continue
            if lower < upper:
                lower = tvs[settled] = _half_l1(R[i], R[j])
                settled += 1
            kappa = max(kappa, lower)
    if exact and kappa < ATTAINS:  # 0 where all rows agree to the bit, and only there
        spread = 0.0
        for i in range(1, n):
            spread = max(spread, _half_l1(R[0], R[i]))
        kappa = max(kappa, spread) if spread > 0.0 else 0.0
    # Who does, in row-major order: the first witness, else the first. Tokens in all attaining pairs are of the first.
    attaining, holds, settled = 0, False, 0
    pair_i = pair_j = first_i = first_j = 0
    all_i = all_j = True
    for i in range(n - 1):
        if row_best[i] + wide < threshold:
            continue
        for j in range(i + 1, n):
            tv, upper = _bounds(S, h, unit, i, j, exact)
            if upper < threshold:
                continue
            if tv < upper:
                tv = tvs[settled]
                settled += 1
            if tv < kappa - ATTAINS:
                continue
            attaining += 1
            if attaining == 1:
                first_i, first_j = pair_i, pair_j = i, j
            all_i = all_i and (i == first_i or j == first_i)
            all_j = all_j and (i == first_j or j == first_j)
            if not holds and R[i, i] >= R[j, i] and R[j, j] >= R[i, j]:
                holds, pair_i, pair_j = True, i, j
    gap = margin = np.nan
    if what == REPORT:
        sign = 1.0 if holds else -1.0
        for i in range(n):
            own[i] = R[i, i]
        # A pair that attains kappa bounds both minima, and rows whose every pair is farther from kappa are passed over.
        over_i, over_j = own[pair_i] - R[pair_j, pair_i], own[pair_j] - R[pair_i, pair_j]
        loss = min(max((alpha - 1.0) * over_i, 0.0), alpha) + min(max((alpha - 1.0) * over_j, 0.0), alpha)
        most_margin, most_gap = max(sign * min(over_i, over_j), 0.0) + ATTAINS + slop, loss + ATTAINS + slop
        row_margin = lines[1]
        least_gap = least_margin = np.inf
        for i in range(n - 1):
            row_margin[i] = row_gap[i] = np.inf
            below = kappa - row_best[i] - wide
            if below > most_margin and (holds or (1.0 - alpha) * below > most_gap):
                continue
            _column(panels, i, unit, down)
            row, halves, owns = S[i, i + 1 : n], h[i + 1 :], own[i + 1 :]
            across, below_i = R[i, i + 1 :], down[i + 1 : n]
            line = lines[0, : n - 1 - i]
            _margins(row, halves, h[i], unit, owns, own[i], across, below_i, kappa, sign, line)
            row_margin[i] = _least(line)
            most_margin = min(most_margin, row_margin[i] + unit + slop)
            if not holds:
                _gaps(row, halves, h[i], unit, owns, own[i], across, below_i, kappa, alpha, line)
                row_gap[i] = _least(line)
                most_gap = min(most_gap, row_gap[i] + unit + slop)
            least_gap, least_margin = min(least_gap, row_gap[i]), min(least_margin, row_margin[i])
        near = unit * (n + 2) + slop
        gap, margin = np.inf, np.inf
        if holds:
            gap = least_gap = 0.0
        for i in range(n - 1):
            gap_near, margin_near = not holds and row_gap[i] <= least_gap + near, row_margin[i] <= least_margin + near
            if not (gap_near or margin_near):
                continue
            for j in range(i + 1, n):
                lower, upper = _bounds(S, h, unit, i, j, exact)
                below = max(kappa - upper, 0.0)
                if below > margin and not (gap_near and (1.0 - alpha) * below <= gap):
                    continue
                over_i, over_j = own[i] - R[j, i], own[j] - R[i, j]
                slack = sign * min(over_i, over_j)
                loss = min(max((alpha - 1.0) * over_i, 0.0), alpha) + min(max((alpha - 1.0) * over_j, 0.0), alpha)
                wanted = max(slack, below) < margin and max(slack, below) <= least_margin + near
                if gap_near:
                    bound = (1.0 - alpha) * below + loss
                    wanted = wanted or (bound < gap and bound <= least_gap + near)
                if not wanted:
                    continue
                tv = lower
                if lower < upper:
                    if settled == limit:
                        return False
                    settled += 1
                    tv = _half_l1(R[i], R[j])
                below = max(kappa - tv, 0.0)
                margin = min(margin, max(slack, below))
                if not holds:
                    gap = min(gap, (1.0 - alpha) * below + loss)
    elif what == SCORES:
        scores[:] = 0.0
        for x, common in ((first_i, all_i), (first_j, all_j)):
            if common:
                others = _without(S, h, unit, exact, R, x, slop, row_best, lines[0], limit)
                if others < 0.0:
                    return False
                scores[x] = kappa - others
    numbers[0], numbers[1], numbers[2] = kappa, gap, margin
    counts[0], counts[1], counts[2], counts[3] = holds, pair_i, pair_j, attaining
    return True


@_compiled()
def _empty(size, like):
    """Uninitialised memory for `size` numbers of the type of `like`, on a cache line."""
    item = like.itemsize
    flat = np.empty(size + 64 // item, like.dtype)
    skip = (-flat.ctypes.data % 64) // item
    return flat[skip : skip + size]


@_compiled()
def _matrices(A, index, start, stop, what, alpha, stochastic, tolerance, numbers, counts, scores):
    """Matrices `start` to `stop` of the batch, in this thread. False: some matrix is bad input."""
    n = index.size if index.size else A.shape[1]
    blocks = (n + LANES - 1) // LANES
    wide = blocks * LANES
    of_rows = (n + ROWS - 1) // ROWS
    limit = n * n // 40
    one32, one64 = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    small = n <= _SMALL
    run = True
    for k in range(1, index.size):
        run = run and index[k] == index[k - 1] + 1
    R = np.empty((n, n))
    size32, size64 = (0 if small else wide), (wide if small else 0)
    panels = _empty(size32 * n, one32).reshape((size32 // LANES, n, LANES))
    S = _empty(size32 * size32, one32).reshape((size32, size32))
    # What 64 bits need comes with the first matrix that needs it.
    panels64 = _empty(size64 * n, one64).reshape((size64 // LANES, n, LANES))
    S64 = _empty(size64 * size64, one64).reshape((size64, size64))
    masses, h, sums = np.empty(n), np.empty(n), np.empty(wide, np.uint64)
    scratch = (np.empty(n), np.empty(n), np.empty(n), np.empty(wide), np.empty((2, n)), np.empty(limit))
    for b in range(start, stop):
        if not _load(A[b], index, run, stochastic, tolerance, R, masses):
            return False
        row = scores[b] if what == SCORES else masses
        if not small:
            for i in range(n):
                h[i] = 0.5 * masses[i]
            _fill(R, 1.0 / _UNIT32, panels)
            _sum_minima(panels, S, 0, 1)
            # Where one pair in eight of a sample ties, more than `limit` of all will: the screen would be in vain.
            if _unresolved(S, h, _UNIT32, scratch[3]) <= n * ROWS // 8:
                _sum_minima(panels, S, 1, of_rows)
                if _evaluate(
                    S, panels, h, _UNIT32, False, R, what, alpha, limit, scratch, numbers[b], counts[b], row
                ):
                    continue
        if panels64.size == 0:
            panels64 = _empty(wide * n, one64).reshape((blocks, n, LANES))
            S64 = _empty(wide * wide, one64).reshape((wide, wide))
        _fill(R, 1.0 / _UNIT64, panels64)
        _sum_minima(panels64, S64, 0, of_rows)
        sums[:] = 0
        for block in range(blocks):
            for k in range(n):
                for c in range(LANES):
                    sums[block * LANES + c] += panels64[block, k, c]
        for i in range(n):
            h[i] = (0.5 * _UNIT64) * sums[i]
        _evaluate(S64, panels64, h, _UNIT64, True, R, what, alpha, limit, scratch, numbers[b], counts[b], row)
    return True


@_compiled()
def _load_lanes(A, base, size, index, stochastic, tolerance, R, T):
    """Lane b of vector ``N i + k`` of R is A_ik of matrix ``base + b``, as the definition has it, and T the subchain on
    `index` if there is one. Lanes to spare repeat the last matrix. Lanes that are not 0 in what is returned are bad."""
    N, n = A.shape[1], index.size
    for b in range(LANES):
        entries = A[base + min(b, size - 1)].reshape(N * N)
        for at in range(N * N):
            R[at * LANES + b] = entries[at]
    zero, one = every(0.0), every(1.0)
    bad, lowest, tolerated = zero, zero, every(tolerance)
    for i in range(N):
        total = zero
        for k in range(N):
            x = get(R, i * N + k)
            lowest = least(x, lowest)
            total = total + x
        off = magnitude(total - one) if stochastic else total - one
        bad = most(bad, choose(tolerated, off, zero, one))  # NaN, too, is not within the tolerance
        if stochastic and n == 0:
            by = choose(every(N * 2.0**-52), off, one, total)
            for k in range(N):
                put(R, i * N + k, get(R, i * N + k) / by)
    bad = most(bad, choose(lowest, zero, zero, one))
    rounding = every(n * 2.0**-52)
    for i in range(n):
        total = zero
        for k in range(n):
            total = total + get(R, index[i] * N + index[k])
        bad = most(bad, choose(zero, total, one, zero))
        again, by = zero, choose(rounding, magnitude(total - one), one, total)
        for k in range(n):
            x = get(R, index[i] * N + index[k]) / by
            again = again + x
            put(T, i * n + k, x)
        by = choose(rounding, magnitude(again - one), one, again)
        for k in range(n):
            put(T, i * n + k, get(T, i * n + k) / by)
    return bad


@_compiled()
def _evaluate_lanes(R, n, what, alpha, tv, found):
    """As `_evaluate`, for `LANES` matrices side by side: every pair in float64, no screen.

    `found` gets seven vectors: kappa, gap, margin, how many pairs attain kappa, and which is the first that attains
    it, the first that is a witness, too (the number of pairs where none is). Indices are exact in float64.
    """
    zero, one, half = every(0.0), every(1.0), every(0.5)
    pairs, p = every(float(n * (n - 1) // 2)), 0
    kappa = zero
    for i in range(n - 1):
        for j in range(i + 1, n):
            total = zero
            for k in range(n):
                total = total + magnitude(get(R, i * n + k) - get(R, j * n + k))
            total = least(half * total, one)
            kappa = most(kappa, total)
            put(tv, p, total)
            p += 1
    put(found, 0, kappa)
    attaining, first, witness = zero, pairs, pairs
    threshold, p = kappa - every(ATTAINS), 0
    for i in range(n - 1):
        own = get(R, i * n + i)
        for j in range(i + 1, n):
            slack = least(own - get(R, j * n + i), get(R, j * n + j) - get(R, i * n + j))
            this = choose(get(tv, p), threshold, every(float(p)), pairs)
            attaining = attaining + choose(get(tv, p), threshold, one, zero)
            first = least(first, this)
            witness = least(witness, choose(slack, zero, this, pairs))
            p += 1
    put(found, 3, attaining)
    put(found, 4, first)
    put(found, 5, witness)
    if what != REPORT:
        return
    gap, margin = every(np.inf), every(np.inf)
    sign = choose(witness, pairs, zero - one, one)
    whole, weight, p = every(alpha), every(1.0 - alpha), 0
    for i in range(n - 1):
        own = get(R, i * n + i)
        for j in range(i + 1, n):
            over_i, over_j = own - get(R, j * n + i), get(R, j * n + j) - get(R, i * n + j)
            below = kappa - get(tv, p)
            margin = least(margin, most(sign * least(over_i, over_j), below))
            loss_i, loss_j = most(zero - weight * over_i, zero), most(zero - weight * over_j, zero)
            gap = least(gap, weight * below + (least(loss_i, whole) + least(loss_j, whole)))
            p += 1
    put(found, 1, choose(witness, pairs, gap, zero))
    put(found, 2, margin)


@_compiled()
def _small_matrices(A, index, start, stop, what, alpha, stochastic, tolerance, numbers, counts):
    """As `_matrices`, for small N: vectors hold an entry of many matrices, so there is no N too small for them."""
    N = A.shape[1]
    n = index.size if index.size else N
    pairs = n * (n - 1) // 2
    one = np.zeros(1)
    R, T = _empty(N * N * LANES, one), _empty(index.size * index.size * LANES, one)
    tv, found, wrong = _empty(pairs * LANES, one), _empty(6 * LANES, one), _empty(LANES, one)
    found[:] = np.nan
    members = np.empty((pairs, 2), np.int64)
    p = 0
    for i in range(n - 1):
        for j in range(i + 1, n):
            members[p, 0], members[p, 1] = i, j
            p += 1
    for base in range(start, stop, LANES):
        size = min(LANES, stop - base)
        put(wrong, 0, _load_lanes(A, base, size, index, stochastic, tolerance, R, T))
        for b in range(LANES):
            if wrong[b] != 0.0:
                return False
        _evaluate_lanes(T if index.size else R, n, what, alpha, tv, found)
        for b in range(size):
            holds = found[5 * LANES + b] < pairs
            p = int(found[(5 if holds else 4) * LANES + b])
            for of in range(3):
                numbers[base + b, of] = found[of * LANES + b]
            counts[base + b, 0], counts[base + b, 1], counts[base + b, 2] = holds, members[p, 0], members[p, 1]
            counts[base + b, 3] = int(found[3 * LANES + b])
    return True


@_compiled()
def _means(A, start, stop, means):
    for b in range(start, stop):
        for i in range(A.shape[2]):
            row = means[b, i]
            row[:] = 0.0
            for head in range(A.shape[1]):
                source = A[b, head, i]
                for k in range(row.size):
                    row[k] += source[k]
            for k in range(row.size):
                row[k] /= A.shape[1]
    return True


def _share(size: int, most: int, work: Callable[[int, int], bool]) -> bool:
    """Call ``work(start, stop)`` until `size` is done, on as many threads as torch uses; false if any call is."""
    if size == 0:
        return True
    threads = min(torch.get_num_threads(), size)
    if threads == 1:
        return work(0, size)
    chunk = max(1, min(size // (2 * threads), most))
    starts = iter(range(0, size, chunk))

    def several() -> bool:
        return all(work(start, min(start + chunk, size)) for start in starts)

    with ThreadPoolExecutor(threads) as pool:
        return all([task.result() for task in [pool.submit(several) for _ in range(threads)]])


def mean_of_heads(A: np.ndarray) -> np.ndarray:
    """The mean over heads in float64, on as many threads as torch uses.

    :param A: float32 or float64, shape (B, H, N, N), C-contiguous.
    :return: float64, shape (B, N, N).
    """
    means = np.empty((A.shape[0], *A.shape[2:]))
    _share(len(A), 1, lambda start, stop: _means(A, start, stop, means))
    return means


def pairs_of_rows(
    A: np.ndarray,
    tokens: np.ndarray | None = None,
    *,
    what: int = REPORT,
    alpha: float = 0.5,
    stochastic: bool = True,
    tolerance: float = 1e-6,
) -> Found | None:
    """One pass over the pairs of rows of every matrix of a batch, on as many threads as torch uses.

    :param A: float32 or float64, shape (B, N, N), C-contiguous, N at least 2.
    :param tokens: int64, the distinct tokens to restrict to (book: def-subchain), at least two; None for all of them.
    :param what: `KAPPA`, `REPORT` or `SCORES`.
    :param alpha: weight of the residual stream, strictly between 0 and 1.
    :param stochastic: rows sum to 1 within `tolerance` and are renormalised; otherwise to at most 1 + `tolerance`.
    :return: None where an entry is negative or not finite, a row's sum is off, or a row has no mass left on `tokens`:
        :func:`dobnb.stochastic.as_stochastic` and :func:`dobnb.stochastic.restrict` say which.
    """
    B, N = A.shape[:2]
    index = np.empty(0, np.int64) if tokens is None else tokens
    n = index.size or N
    numbers, counts = np.full((B, 3), np.nan), np.zeros((B, 4), np.int64)
    scores = np.zeros((B if what == SCORES else 0, n))

    def work(start: int, stop: int) -> bool:
        if N <= _SMALL and what != SCORES:
            return _small_matrices(A, index, start, stop, what, alpha, stochastic, tolerance, numbers, counts)
        return _matrices(A, index, start, stop, what, alpha, stochastic, tolerance, numbers, counts, scores)

    if not _share(B, 4096, work):
        return None
    kappa, gap, margin = numbers.T
    return Found(kappa, gap, margin, counts[:, 0].astype(bool), counts[:, 1:3], counts[:, 3], scores)
