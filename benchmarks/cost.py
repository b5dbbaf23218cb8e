"""Dollars and kilowatt-hours of 1B tokens. The price of a GPU-hour is assumed, not looked up: put yours here."""

from __future__ import annotations

DATED = "2026-11-23"
DOLLARS_PER_HOUR = {"NVIDIA A100": 2.20, "NVIDIA H200": 4.00}
WATTS = {"NVIDIA A100": 400, "NVIDIA H200": 700}  # at most, by the SXM cards' data sheets
NOTE = ", ".join(f"{gpu} {price:.2f}" for gpu, price in DOLLARS_PER_HOUR.items()) + f" dollars an hour, as of {DATED}"


def dollars_an_hour(device: str) -> float:
    """0 of a device without a price."""
    return next((price for gpu, price in DOLLARS_PER_HOUR.items() if device.startswith(gpu)), 0.0)


def dollars(device: str, tokens_per_s: float) -> float | None:
    """Of 1B tokens; None on a device without a price."""
    return dollars_an_hour(device) * 1e9 / tokens_per_s / 3600 or None


def kilowatt_hours(joules_per_mtoken: float) -> float:
    """Of 1B tokens."""
    return 1000 * joules_per_mtoken / 3.6e6


def most_kilowatt_hours(device: str, tokens_per_s: float) -> float:
    """Of 1B tokens, at the power limit."""
    (watts,) = (watts for gpu, watts in WATTS.items() if device.startswith(gpu))
    return kilowatt_hours(1e6 * watts / tokens_per_s)
