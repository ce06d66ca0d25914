"""Draw what happens in a training step of each method: SVG files, next to this script."""

from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyBboxPatch

KINDS = {  # fill, edge, rounding of the corners, and what the legend says
    "frozen": ("#d3dfec", "#34597f", 1, "frozen"),
    "trained": ("#ffdd94", "#8a5a00", 1, "trained"),
    "dropped": ("#fff8e6", "#8a5a00", 1, "trained, then dropped"),
    "memory": ("#d0e9d0", "#2f6e2f", 1, "memory"),
    "step": ("#fafafa", "#555555", 1, "computed, no weights"),
    "loss": ("#f7d0cc", "#9c2f27", 20, "loss"),
    "data": ("white", "#777777", 5, "data"),
}
TEACHER = "Teacher\nfrozen; runs once,\nbefore training"


def canvas(height, kinds, *stages):
    """800 pixels wide, y grows downwards; a legend, and a frame (top, end, name) for each stage."""
    figure = plt.figure(figsize=(800 / 96, height / 96))
    figure.add_axes((0, 0, 1, 1), xlim=(0, 800), ylim=(height, 0)).axis("off")
    widths = [84 + 6 * len(KINDS[kind][-1]) for kind in kinds.split()]
    for kind, x in zip(kinds.split(), np.cumsum([420 - sum(widths) / 2, *widths])):
        box(kind, x, height - 20, 34, "", 18)
        text(x + 25, height - 20, KINDS[kind][-1], ha="left")
    for n, (top, end, name) in enumerate(stages, 1):
        for x, fill in ((794, "white"), (32, "#e4e4e4")):
            plt.fill((6, x, x, 6), (top, top, end, end), fc=fill, ec="#aaaaaa", zorder=0)
        text(19, (top + end) / 2, f"Stage {n}: {name}", True, rotation=90, va="center")


def text(x, y, words, bold=False, **options):
    font = dict(size=10.5, weight="bold") if bold else dict(size=9.5)
    plt.text(x, y, words, **dict(ha="center", va="center_baseline") | font | options)


def box(kind, x, y, w, words, h=None):
    """A box around (x, y), its first line in bold. Kinds differ in shape, not only in color."""
    fill, edge, rounding, _ = KINDS[kind]
    h = h or (32 if kind == "data" else 72)
    side = SimpleNamespace(left=x - w / 2, right=x + w / 2, top=y - h / 2, bottom=y + h / 2, y=y)
    style = dict(boxstyle=f"round,pad=0,rounding_size={min(rounding, h / 2.5)}", zorder=2)
    style |= dict(fc=fill, ec=edge, linewidth=1.5, ls="--" if kind == "dropped" else "-")
    for inset in (0, 4) if kind == "frozen" else (0,):  # a double edge
        corner = (side.left + inset, side.top + inset)
        plt.gca().add_patch(FancyBboxPatch(corner, w - 2 * inset, h - 2 * inset, **style))
        style["linewidth"] = 0.8
    for slot in (4, 8, w - 8, w - 4) if kind == "memory" else ():  # at both ends
        plt.plot([side.left + slot] * 2, [side.top, side.bottom], color=edge, lw=0.9, zorder=2)
    for row, line in enumerate(lines := words.split("\n")):
        height = y + (row - (len(lines) - 1) / 2) * 16.5
        text(x, height, line, bold=row == 0 and kind != "data")
    return side


def arrow(*points, label="", dashed=False, weights=False):
    """Horizontal and vertical lines through points; weights: a model goes on, not data."""
    size, width, color = (6, 3.5, "#888888") if weights else (3.5, 1.3, "#222222")
    before, end = np.array(points[-2:])
    ahead = np.sign(end - before)
    neck, aside = end - 2.3 * size * ahead, size * ahead[::-1]
    path = zip(*points[:-1], neck)
    plt.plot(*path, color=color, linewidth=width, linestyle="--" if dashed else "-", zorder=1)
    plt.fill(*zip(end, neck + aside, neck - aside), color=color, linewidth=0, zorder=3)
    x, y = (before + end) / 2 + (0, -11) if ahead[0] else 0.3 * before + 0.7 * end + (12, 0)
    text(x, y, label, ha="center" if ahead[0] else "left")


def right(start, *ends):
    """Horizontal arrows from box to box, each at the height of the lower box of its two."""
    for end in ends:
        y = min(start, end, key=lambda side: side.bottom - side.top).y
        arrow((start.right, y), (end.left, y))
        start = end


def fork(start, x, *ends):
    """Arrows from a box to the left sides of others, through corners at x; ends: (box, y)."""
    for end, y in ends:
        arrow((start.right, start.y), (x, start.y), (x, y), (end.left, y))
    plt.plot(x, start.y, "o", color="#222222", markersize=3.5)


def ckd():
    canvas(540, "frozen trained dropped memory loss", (8, 330, "distill"), (342, 500, "finetune"))
    teacher = box("frozen", 242, 74, 146, TEACHER)
    student = box("trained", 242, 268, 146, "Student\ntrained")
    m = "Projection M\nif dimensions differ;\ndropped after stage 1"
    bank = "Memory bank\n$h^T$ of earlier batches;\nemptied when\nan epoch begins"
    bank = box("memory", 686, 68, 196, bank, 86)
    loss = "InfoNCE\neq. 5 (with M: eq. 6)\n\nor --objective kd:\nsquared error, no bank\n"
    loss = box("loss", 686, 238, 196, loss + "eq. 2 (with M: eq. 3)", 142)
    fork(box("data", 94, 174, 96, "sentences"), 156, (teacher, 74), (student, 268))
    right(student, box("data", 358, 268, 44, "$h^S$"), box("dropped", 480, 268, 160, m), loss)
    right(teacher, box("data", 358, 74, 44, "$h^T$"))
    arrow((358, 90), (358, 196), (loss.left, 196), label="positive, in-batch negatives")
    arrow((686, bank.bottom), (686, loss.top), label="1. read")
    arrow((380, 74), (bank.left, 74), label="2. enqueue, after the loss", dashed=True)
    again = box("trained", 242, 436, 146, "Student\ntrained")
    arrow((242, 304), (242, again.top), label="the best on dev, without M", weights=True)
    triplets = box("data", 94, 436, 104, "anchor,\npositive, hard\nnegative", 70)
    loss = "InfoNCE, eq. 7\nnegatives: other $h^+$\nand all $h^-$ of the batch"
    h = box("data", 390, 436, 100, "$h, \\; h^+, \\; h^-$")
    right(triplets, again, h, box("loss", 686, 436, 196, loss, 84))


def congen():
    canvas(424, "frozen trained memory step loss")
    teacher = box("frozen", 196, 170, 140, TEACHER)
    student = box("trained", 196, 301, 140, "Student\ntrained; the head\nis kept", 140)
    queue = "Instance queue D\nK teacher embeddings, full from\nthe start; first in, first out"
    queue = box("memory", 464, 54, 256, queue, 76)
    softmax = "Softmax, eq. 1\nof the cosines\nwith D, divided by\n$τ^T$ (teacher) or\n"
    softmax = box("step", 464, 257, 144, softmax + "$τ^S$ (student)", 240)
    loss = "Loss, eq. 2\n\n$α \\; {\\rm CE}(P_{\\rm ref}, P_{\\rm con})$\ncontrol\n\n$+ \\; "
    loss += "(1-α) \\; {\\rm CE}(P_{\\rm ref}, P_{\\rm gen})$\ngeneralize\n\nCE: cross-entropy"
    loss = box("loss", 702, 257, 184, loss, 240)
    fork(box("data", 58, 218, 94, "first view"), 115, (teacher, 170), (student, 258))
    right(box("data", 58, 344, 94, "second view,\nother words", 46), student)
    for source, y, name in ((teacher, 170, "ref"), (student, 258, "con"), (student, 344, "gen")):
        z = box("data", 316, y, 50, f"$z_{{\\rm {name}}}$")
        right(source, z, softmax, box("data", 573, y, 50, f"$P_{{\\rm {name}}}$"), loss)
    arrow((316, 154), (316, 54), (queue.left, 54), dashed=True)
    text(304, 84, "1. enqueue,\nbefore the loss", ha="right")
    arrow((464, queue.bottom), (464, softmax.top), label="2. read")


def ibkd():
    canvas(632, "frozen trained dropped loss", (8, 294, "distill"), (306, 592, "finetune"))
    teacher = box("frozen", 234, 60, 142, TEACHER)
    student = box("trained", 234, 202, 142, "Student\ntrained", 150)
    again = box("trained", 234, 456, 142, "Student\ntrained", 226)
    arrow((234, student.bottom), (234, again.top), weights=True, label="the best on dev, without W")
    w = box("dropped", 462, 154, 128, "Mapping W\ndropped\nafter stage 1", 66)
    kept = "Projection\n$S' = W_{\\rm proj} S$,\neq. 11; only with\n--dim, then kept"
    kept = box("trained", 462, 408, 128, kept, 136)
    for top, n, of, model, m in ((306, 2, "of all texts,\n", again, kept), (8, 1, "", student, w)):
        s, x = [box("data", 346, top + y, 44, f"${name}$") for name, y in (("S", 146), ("X", 244))]
        nce = ("section 3.1,\nin-batch", "eq. 10, hard\nand in-batch")[n - 1]
        nce = box("loss", 602, top + 96, 108, f"InfoNCE\n{nce}\nnegatives", 150)
        hsic = box("loss", 602, top + 225, 108, f"HSIC\n{of}eq. 6, 7", 78)
        end = box("loss", 731, top + 143, 100, f"Loss, eq. {7 + n}\n\nInfoNCE\n+ $β_{n}$ HSIC", 244)
        right(model, s, m, nce, end)
        right(model, x, hsic, end)
        fork(s, 382, (hsic, top + 206))
        text(454, top + 261, "mean input embedding")
    fork(box("data", 92, 131, 96, "texts"), 150, (teacher, 60), (student, 202))
    right(teacher, box("data", 346, 60, 44, "$T$"), nce)
    right(box("data", 92, 452, 96, "anchors"), again)
    others = box("data", 92, 358, 96, "positives and\nnegatives", 46)
    right(others, again, box("data", 346, 358, 56, "$S^+, S^-$"), kept)


def dse():
    canvas(516, "frozen trained loss", (8, 156, "teacher"), (168, 476, "student"))
    before = box("trained", 250, 80, 146, "Teacher\ntrained, unless it is\nalready a classifier")
    teacher = box("frozen", 250, 248, 146, TEACHER)
    arrow((250, before.bottom), (250, teacher.top), label="the best on dev", weights=True)
    loss = box("loss", 700, 82, 172, "Loss of the labels\nsection 3.5;\neq. 2 with $α = 0$", 104)
    both = "Loss, eq. 2\n\n$α \\; ‖S_{yz} - T_{yz}‖^2$\n\n$+ \\; (1-α)$ loss of\n"
    both = box("loss", 700, 312, 172, both + "the labels (3.5)", 188)
    for model, y, height, end in ((before, 80, 56, loss), (teacher, 248, 248, both)):
        t = box("data", 372, height, 50, "$T_{yz}$")
        right(box("data", 100, y, 110, "pair (y, z)"), model, t, end)
        right(box("data", 546, height + 52, 90, "label $R_{yz}$"), end)
    encoder = box("trained", 250, 392, 146, "Encoder $\\psi$\ntrained; the same\nfor y and z", 130)
    head = box("trained", 462, 392, 100, "Head $f$\neq. 3;\ntrained", 130)
    for name, u, y in (("sentence y", "$u$", 352), ("sentence z", "$v$", 432)):
        right(box("data", 100, y, 110, name), encoder, box("data", 372, y, 50, u), head)
    right(head, box("data", 562, 380, 50, "$S_{yz}$"), both)


def distilface():
    canvas(292, "trained step loss")
    student = box("trained", 298, 140, 138, "Student\ntrained, without\na teacher", 200)
    pooling = "Pooling\ndefault: mean\nof last 4 layers,\nthen of tokens\n(section 5.6)"
    pooling = box("step", 450, 140, 116, pooling, 200)
    fork(box("data", 57, 140, 92, "sentences"), 113, (student, 92), (student, 204))
    for y, mask in ((92, "z"), (204, "z'")):
        text(169, y - 11, f"dropout mask ${mask}$")
        arrow((student.right, y), (pooling.left, y))
    grid = box("step", 630, 92, 90, "", 90)
    ends = np.linspace(-45, 45, 6)
    plt.pcolormesh(630 + ends, 92 + ends, np.eye(5), cmap="Greys", vmax=2, ec="#555555", zorder=3)
    text(630, 30, "cosines; dark: positives")
    h = box("data", 547, 92, 40, "$h$")
    right(pooling, h, grid, box("loss", 742, 92, 96, "InfoNCE\nsection 3"))
    right(pooling, box("data", 547, 204, 40, "$h^+$"))
    arrow((567, 204), (630, 204), (630, grid.bottom))


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "figures"  # and no date: the same bytes each time
    for method in (ckd, congen, ibkd, dse, distilface):
        method()
        plt.savefig(Path(__file__).with_name(f"{method.__name__}.svg"), metadata={"Date": None})
