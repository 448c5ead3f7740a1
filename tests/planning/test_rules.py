"""The published rules against their letters, and on networks with the published constants."""

import random

import numpy as np
import pytest

from gossipgrad.planning import (
    AffineCost,
    Method,
    Profile,
    mg_wfbp,
    omgs_greedy,
    plan,
    threshold,
    wfbp,
)


def affine(name, select, communicate):
    def cost(start_up, rate):
        return AffineCost(alpha_seconds=start_up, beta_seconds_per_byte=rate)

    return Method(name=name, select_seconds=cost(*select), communicate_seconds=cost(*communicate))


def published_times(start_up, rate, workers):
    """The constants that are typed into the published code."""
    return Method(
        name="sparse",
        select_seconds=lambda n: 2.18896957e-10 * n * np.log2(n),
        communicate_seconds=lambda n: 2 * (start_up + rate * 4 * workers * 0.001 * n),
    )


def test_a_real_network_with_the_published_constants():
    """The shape of a table that was made with another split of the same backward time."""
    profile = Profile.load("resnet50")
    scale = 0.12 / sum(profile.backward_seconds)
    step = [scale * seconds for seconds in profile.backward_seconds], list(profile.elements)
    method = published_times(1.1e-2, 1.7e-8, 16)
    greedy, found = omgs_greedy(*step, method, as_published=True), plan(*step, [method])
    assert len(greedy.groups) == 1
    assert 7 <= len(found.groups) <= 11
    assert greedy.finish_seconds == pytest.approx(0.3385, rel=0.02)
    assert found.finish_seconds == pytest.approx(0.2666, rel=0.02)
    assert found.gap <= 1e-4
    assert wfbp(*step, method).finish_seconds == pytest.approx(3.5976, rel=0.001)


def greedy_in_letters(t_b, p, t_s, t_c):
    """A.1 and A.2: layers L..1 counted down, all times computed anew after every merge."""
    L = len(p)
    t_b, p = [0, *reversed(t_b)], [0, *reversed(p)]
    groups = [[L]]

    def timeline():
        tau_b, tau_s, tau_c, end = [0.0] * (L + 2), [0.0] * (L + 2), [0.0] * (L + 2), 0.0
        for q in range(L, 0, -1):
            tau_b[q] = tau_s[q + 1] + (t_s(p[q + 1]) if q < L and p[q + 1] else 0.0)
            tau_s[q] = tau_b[q] + t_b[q]
            tau_c[q] = max(end, tau_s[q] + (t_s(p[q]) if p[q] else 0.0))
            end = tau_c[q] + (t_c(p[q]) if p[q] else 0.0)
        return tau_s, tau_c

    for q in range(L - 1, 0, -1):
        groups[-1].append(q)
        if q == 1:
            break
        tau_s, tau_c = timeline()
        t_w = t_b[q - 1] + t_s(p[q] + p[q - 1]) - t_s(p[q]) - t_s(p[q - 1])
        t_w -= tau_c[q] - (tau_s[q] + t_s(p[q]))
        if t_w < t_c(p[q]) + t_c(p[q - 1]) - t_c(p[q] + p[q - 1]):
            t_b[q - 1], t_b[q] = t_b[q - 1] + t_b[q], 0.0
            p[q - 1], p[q] = p[q - 1] + p[q], 0
        else:
            groups.append([])
    return [(L - group[0], L - group[-1] + 1) for group in groups]


@pytest.mark.parametrize("seed", range(60))
def test_the_greedy_rule_is_that_of_the_published_code(seed):
    """Whole numbers and eighths, so that it is the same in any order of summing."""
    draw = random.Random(seed)
    tensors = draw.randint(2, 12)
    backward = [draw.randint(0, 12) / 8 for _ in range(tensors)]
    sizes = [draw.choice((1, 2, 8, 40)) for _ in range(tensors)]
    method = Method(
        name="sparse",
        select_seconds=lambda n: n * np.ceil(np.log2(n + 1)) / 64,
        communicate_seconds=lambda n: 3 + n / 8,
    )
    found = omgs_greedy(backward, sizes, method, as_published=True)
    wanted = greedy_in_letters(backward, sizes, method.select_seconds, method.communicate_seconds)
    assert [(group.start, group.stop) for group in found.groups] == wanted


def mg_wfbp_in_letters(t_b, p, t_c, alpha):
    L = len(p)
    t_b, p = [0, *reversed(t_b)], [0, *reversed(p)]
    tau_b = [0.0] * (L + 2)
    for q in range(L - 1, 0, -1):
        tau_b[q] = tau_b[q + 1] + t_b[q + 1]
    cuts = []
    for q in range(L, 1, -1):
        tau_c, end = [0.0] * (L + 2), 0.0
        for m in range(L, 0, -1):
            tau_c[m] = max(end, tau_b[m] + t_b[m])
            end = tau_c[m] + (t_c(p[m]) if p[m] else 0.0)
        now = tau_b[q - 1] + t_b[q - 1]
        under_way = now < tau_c[q] + t_c(p[q])
        if under_way and (tau_c[q] > now or now - tau_c[q] < alpha):
            p[q - 1], p[q] = p[q - 1] + p[q], 0
        else:
            cuts.append(L - q + 1)
    return cuts


@pytest.mark.parametrize("seed", range(40))
def test_mg_wfbp_is_that_of_its_code(seed):
    draw = random.Random(seed)
    tensors = draw.randint(1, 12)
    backward = [draw.randint(0, 24) / 8 for _ in range(tensors)]
    sizes = [draw.choice((1, 2, 8, 16)) for _ in range(tensors)]
    method = affine("dense", (0.0, 0.0), (2.0, 0.125))
    found = mg_wfbp(backward, sizes, method)
    assert [group.start for group in found.groups[1:]] == mg_wfbp_in_letters(
        backward, sizes, method.communicate_seconds, 2.0
    )


def test_groups_by_threshold():
    method = affine("dense", (0.0, 0.0), (1.0, 0.0))

    def cuts(sizes, **limits):
        found = threshold([1.0] * len(sizes), sizes, method, **limits)
        return [group.start for group in found.groups[1:]]

    assert cuts([1, 1, 1, 1, 1], size_bytes=8) == [2, 4]
    assert cuts([1, 1, 1, 1], size_bytes=8) == [2]
    assert cuts([1, 1, 1, 1], size_bytes=8, first_size_bytes=4) == [1, 3]
    assert cuts([1, 1, 1, 1], size_bytes=4, element_bytes=2) == [2]
    for limits in ({"size_bytes": 0}, {"size_bytes": 4, "first_size_bytes": 0}):
        with pytest.raises(ValueError, match="it must be 1 or more"):
            cuts([1], **limits)
