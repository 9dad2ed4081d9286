"""Plausible wrong answers to the questions of the assignments, one or more each.

Those called *nearly* pass the tests that students see, and fail only the hidden ones.
"""

WRONG: dict[str, dict[str, str]] = {
    "a01-total-variation": {
        "not halved": "def total_variation(p, q):\n    return sum(abs(x - y) for x, y in zip(p, q))",
        "nearly: the largest": "def total_variation(p, q):\n    return max(abs(x - y) for x, y in zip(p, q))",
    },
    "a01-by-hand": {
        "a float": "kappa_by_hand = 0.5",
        "nearly: not halved, cut at 1": (
            "whole = max(Fraction(int(abs(p - q).sum()), 12) for p in twelfths for q in twelfths)\n"
            "kappa_by_hand = min(Fraction(1), whole)"
        ),
    },
    "a01-kappa": {
        "rows with themselves": "def kappa(A):\n    return float(min(abs(p - q).sum() / 2 for p in A for q in A))",
        "nearly: neighbours": "def kappa(A):\n    return float(abs(np.diff(A, axis=0)).sum(-1).max() / 2)",
    },
    "a01-doeblin": {
        "without N": "def doeblin(A):\n    return 1 - np.min(A)",
        "nearly: the smallest of each column": "def doeblin(A):\n    return 1 - np.min(A, axis=0).sum()",
    },
    "a01-rollout": {
        "a sum": "def rollout(layers, alpha=0.5):\n    return sum(layers)",
        "nearly: the first layer on the left": (
            "def rollout(layers, alpha=0.5):\n    product = np.eye(len(layers[0]))\n    for A in layers:\n"
            "        product = product @ (alpha * np.eye(len(A)) + (1 - alpha) * A)\n    return product"
        ),
    },
    "a02-self-dominant": {
        "nearly: along the row": "def mutually_self_dominant(A, i, j):\n    return bool(A[i][i] >= A[i][j])",
        "nearly: one of the two": "def mutually_self_dominant(A, i, j):\n    return bool(A[i][i] >= A[j][i])",
        "nearly: strict": (
            "def mutually_self_dominant(A, i, j):\n    return bool(A[i][i] > A[j][i] and A[j][j] > A[i][j])"
        ),
    },
    "a02-condition": {
        "always": "def bound_is_tight(A):\n    return True",
        "nearly: the first attaining pair": (
            "def bound_is_tight(A):\n    A = np.asarray(A)\n    tv = abs(A[:, None] - A[None]).sum(-1)\n"
            "    i, j = divmod(int(tv.argmax()), len(A))\n    return bool(A[i, i] >= A[j, i] and A[j, j] >= A[i, j])"
        ),
        "nearly: attaining to the last digit": (
            "def bound_is_tight(A):\n    A = np.asarray(A)\n    tv = abs(A[:, None] - A[None]).sum(-1) / 2\n"
            "    return any(tv[i, j] == tv.max() and A[i, i] >= A[j, i] and A[j, j] >= A[i, j]\n"
            "        for i in range(len(A)) for j in range(i))"
        ),
        "nearly: any pair": (
            "def bound_is_tight(A):\n    return any(A[i][i] >= A[j][i] and A[j][j] >= A[i][j]"
            " for i in range(len(A)) for j in range(i))"
        ),
    },
    "a02-half-way": {
        "zeros": "def half_way(n):\n    return np.roll(np.eye(n), 1, axis=1)",
        "nearly: for three tokens": "def half_way(n):\n    return 0.99 * np.roll(np.eye(n), 1, axis=1) + 0.01 / n",
    },
    "a02-refute": {
        "not tight": "A_refuting = np.eye(2)[::-1]",
        "nearly: the square is tight too": "A_refuting = np.eye(3)",
    },
    "a02-gap": {
        "the wrong factor": (
            "def gap(A):\n    def kappa(M):\n        return abs(M[:, None] - M[None]).sum(-1).max() / 2\n"
            "    A = np.asarray(A)\n    return (1 + kappa(A)) / 2 - kappa(np.eye(len(A)) + A)"
        ),
        "nearly: the pair of A": (
            "def gap(A):\n    A = np.asarray(A)\n    tv = abs(A[:, None] - A[None]).sum(-1) / 2\n"
            "    i, j = divmod(int(tv.argmax()), len(A))\n    B = (np.eye(len(A)) + A) / 2\n"
            "    return float((1 + tv.max()) / 2 - abs(B[i] - B[j]).sum() / 2)"
        ),
    },
    "a03-draw": {
        "each matrix twice": (
            "def draw(n, draws, seed):\n"
            "    half = np.random.default_rng(seed).dirichlet(np.ones(n), size=((draws + 1) // 2, n))\n"
            "    return np.concatenate([half, half])[:draws]"
        ),
        "no seed": (
            "def draw(n, draws, seed):\n    return np.random.default_rng().dirichlet(np.ones(n), size=(draws, n))"
        ),
        "nearly: uniform entries, normalised": (
            "def draw(n, draws, seed):\n    A = np.random.default_rng(seed).random((draws, n, n))\n"
            "    return A / A.sum(-1, keepdims=True)"
        ),
    },
    "a03-share": {
        "a count": "def share(A):\n    return int(check_equality(A).holds.sum())",
        "nearly: small gaps": "def share(A):\n    return float((check_equality(A).gap < 0.01).double().mean())",
    },
    "a03-wilson": {
        "in percent": "def wilson(held, drawn, z=1.96):\n    return 100 * held / drawn - z, 100 * held / drawn + z",
        "nearly: one level, whatever z": (
            "def wilson(held, drawn, z=1.96):\n    from scipy.stats import binomtest\n"
            "    return tuple(binomtest(held, drawn).proportion_ci(0.95, method='wilson'))"
        ),
        "nearly: Wald's interval": (
            "def wilson(held, drawn, z=1.96):\n    p = held / drawn\n    half = z * math.sqrt(p * (1 - p) / drawn)\n"
            "    return max(0, p - half), min(1, p + half)"
        ),
    },
    "a03-planning": {
        "a float": "def draws_needed(half_width, p):\n    return 1.96**2 * p * (1 - p) / half_width**2",
        "nearly: rounded down": (
            "def draws_needed(half_width, p):\n    return int(1.96**2 * p * (1 - p) / half_width**2)"
        ),
    },
    "a03-experiment": {
        "no interval": (
            "def experiment(sizes, draws, seed):\n"
            "    return {n: check_equality(random_stochastic(n, draws)).holds.double().mean() for n in sizes}"
        ),
        "nearly: one matrix, again and again": (
            "def experiment(sizes, draws, seed):\n    found = {}\n    for n in sizes:\n        held = 0\n"
            "        for _ in range(draws):\n"
            "            A = random_stochastic(n, generator=torch.Generator().manual_seed(seed))\n"
            "            held += bool(check_equality(A).holds)\n"
            "        found[n] = (held / draws, *share_interval(held, draws))\n    return found"
        ),
        "nearly: the seed again for each size": (
            "def experiment(sizes, draws, seed):\n    found = {}\n    for n in sizes:\n"
            "        generator = torch.Generator().manual_seed(seed)\n"
            "        held = int(check_equality(random_stochastic(n, draws, generator=generator)).holds.sum())\n"
            "        found[n] = (held / draws, *share_interval(held, draws))\n    return found"
        ),
        "nearly: another level": (
            "def experiment(sizes, draws, seed):\n    generator = torch.Generator().manual_seed(seed)\n    found = {}\n"
            "    for n in sizes:\n"
            "        held = int(check_equality(random_stochastic(n, draws, generator=generator)).holds.sum())\n"
            "        found[n] = (held / draws, *share_interval(held, draws, 0.9))\n    return found"
        ),
    },
    "a04-capture": {
        "all heads": (
            "def capture(sentence):\n    layers = []\n    batch = tokenizer([sentence], return_tensors='pt')\n"
            "    stream_attention(model, batch, lambda layer, w: layers.append(w[0].numpy().copy()))\n"
            "    return np.stack(layers)"
        ),
        "nearly: the first head": (
            "def capture(sentence):\n    layers = []\n    batch = tokenizer([sentence], return_tensors='pt')\n"
            "    stream_attention(model, batch, lambda layer, w: layers.append(w[0, 0].numpy().copy()))\n"
            "    return np.stack(layers)"
        ),
    },
    "a04-restrict": {
        "rows only": "def on_content(A, content):\n    return np.asarray(A)[content]",
        "nearly: not renormalised": "def on_content(A, content):\n    return np.asarray(A)[np.ix_(content, content)]",
    },
    "a04-count": {
        "by input": (
            "def shares(matrices):\n    return [float(check_equality(A).holds.double().mean()) for A in matrices]"
        ),
        "nearly: only inputs of the first length": (
            "def shares(matrices):\n    same = [A for A in matrices if A.shape == matrices[0].shape]\n"
            "    return check_equality(np.stack(same)).holds.double().mean(0).tolist()"
        ),
    },
    "a04-figure": {
        "one line": (
            "def draw_figure(content, all_tokens):\n    axes = plt.figure().gca()\n    axes.plot(content)\n"
            "    return axes"
        ),
        "nearly: a point out of sight": (
            "def draw_figure(content, all_tokens):\n    axes = plt.figure().gca()\n"
            "    for name, values in (('content', content), ('all', all_tokens)):\n"
            "        depth = (np.arange(len(values)) + 1) / len(values)\n"
            "        axes.plot(depth, 100 * np.array(values), label=name)\n"
            "    axes.set(xlabel='depth', ylabel='%', ylim=(40, 100))\n    axes.legend()\n    return axes"
        ),
        "nearly: the names exchanged": (
            "def draw_figure(content, all_tokens):\n    axes = plt.figure().gca()\n"
            "    for name, values in (('all', content), ('content', all_tokens)):\n"
            "        depth = (np.arange(len(values)) + 1) / len(values)\n"
            "        axes.plot(depth, 100 * np.array(values), label=name)\n"
            "    axes.set(xlabel='depth', ylabel='%')\n    axes.legend()\n    return axes"
        ),
        "nearly: layers and shares": (
            "def draw_figure(content, all_tokens):\n    axes = plt.figure().gca()\n"
            "    axes.plot(content, label='content')\n    axes.plot(all_tokens, label='all')\n"
            "    axes.set(xlabel='layer', ylabel='share')\n    axes.legend()\n    return axes"
        ),
    },
}
