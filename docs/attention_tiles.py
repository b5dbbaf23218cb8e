"""Draws attention-tiles.svg: python docs/attention_tiles.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

LENGTH, KEPT, REACH, TILE, SHOWN = 512, 435, 91, 64, 64
COLOURS = {"left": "#bcd4ea", "near": "#f4c27a", "right": "#cfe8cf"}


def kind(queries: np.ndarray, keys: np.ndarray) -> str:
    if keys[-1] - queries[0] <= -REACH:
        return "left"
    return "right" if keys[0] - queries[-1] >= REACH else "near"


def main() -> None:
    positions = np.sort(np.random.default_rng(0).choice(LENGTH, KEPT, replace=False))
    matplotlib.rcParams.update({"svg.hashsalt": "tiles", "font.size": 10, "svg.fonttype": "none"})
    figure, (tiles, band) = plt.subplots(1, 2, figsize=(11, 5.2), width_ratios=(1, 1.05))
    for first in range(0, KEPT, TILE):
        for start in range(0, KEPT, TILE):
            q, k = positions[first : first + TILE], positions[start : start + TILE]
            box = plt.Rectangle(
                (start, first), len(k), len(q), facecolor=COLOURS[kind(q, k)], edgecolor="white", lw=1.5
            )
            tiles.add_patch(box)
    for side in (-REACH, REACH):  # where the distance is exactly the reach
        column = np.searchsorted(positions, positions + side)
        inside = (positions + side >= 0) & (positions + side < LENGTH)
        tiles.plot(column[inside], np.arange(KEPT)[inside], color="#9c5a00", lw=1)
    tiles.set(xlim=(0, KEPT), ylim=(KEPT, 0), xlabel="packed key", ylabel="packed query", aspect="equal")
    tiles.set_title(f"Tiles of {TILE} x {TILE}: {KEPT} of {LENGTH} positions kept")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    names = ["all at -R or beyond: one constant", "near: lookup", "all at +R or beyond: one constant"]
    handles.append(plt.Line2D([], [], color="#9c5a00", lw=1))
    tiles.legend(
        handles, [*names, f"distance R = {REACH}"], loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8
    )

    filled = np.zeros((SHOWN, 2 * REACH + 1))
    rows = positions[3 * TILE : 3 * TILE + SHOWN]
    for tile, start in enumerate(range(0, KEPT, TILE)):
        for slot, q in enumerate(rows):
            for k in positions[start : start + TILE]:
                if abs(k - q) < REACH:
                    filled[slot, k - q + REACH] = 1 + tile % 2
    shades = matplotlib.colors.ListedColormap(["white", "#f4c27a", "#d98f2b"])
    band.imshow(filled, aspect="auto", cmap=shades, extent=(-REACH - 0.5, REACH + 0.5, SHOWN, 0), interpolation="none")
    band.set(xlabel="distance key - query", ylabel="row of the query tile")
    band.set_title("The band of one query tile: one writer a cell")
    note = "shade: key tile (alternating); white: a position that was removed"
    band.text(0.5, -0.16, note, transform=band.transAxes, ha="center", va="top")
    figure.savefig(Path(__file__).with_name("attention-tiles.svg"), bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
