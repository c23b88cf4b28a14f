"""The figures of a `ModelReport` as texts, for tables on the terminal and on pages."""

from __future__ import annotations

from ort_cuda_plugin.benchmark.measure import ModelReport, SideReport

HEADS = ("p50 ms", "p90", "p99", "items/s", "x plugin", "host", "cold s", "warm s", "MiB", "error")


def title(report: ModelReport) -> str:
    """Return the title of a report's table."""
    return f"{report.model}, batch {report.batch}, on {report.device}"


def figures(found: SideReport) -> list[str]:
    """Return the figures of one provider, in the order of `HEADS`; "-" for an unknown figure."""
    texts = [f"{found.p50:.3f}", f"{found.p90:.3f}", f"{found.p99:.3f}", f"{found.throughput:.1f}"]
    texts += [f"{found.ratio:.2f}", _shown(found.host_share, "{:.0%}")]
    texts += [_shown(found.cold_s, "{:.2f}"), _shown(found.warm_s, "{:.2f}")]
    texts += [_shown(found.device_bytes and found.device_bytes / 2**20, "{:.1f}"), _shown(found.error, "{:.1e}")]
    return texts


def notes(report: ModelReport) -> list[str]:
    """Return lines of text about a report: launches, the estimate, and results that differ."""
    lines = [
        f"a Run of the plugin: {report.launches:g} launches, {report.library_calls:g} library calls,"
        f" {report.graph_replays:g} graph replays; Python calls in all Runs: {report.python_calls}"
    ]
    if report.emulated:
        lines.append("These are times of the emulated device; they say nothing about the speed of a GPU.")
    if report.estimate is not None:
        known = report.estimate
        lines.append(
            f"{known['accuracy']} For {known['device']}: {known['range']}, {known['dram_bytes'] / 1e6:.1f} MB;"
            f" the roofline of the model is {known['roofline_microseconds']:.0f} us, the sum of the steps' rooflines"
            f" {known['steps_roofline_microseconds']:.0f} us"
        )
    lines += [
        f"WRONG: the results of {side} differ by {found.error:.1e}, expected at most {report.tolerance:.0e}"
        for side, found in report.sides.items()
        if found.error is not None and found.error > report.tolerance
    ]
    if report.not_compared:
        lines.append(f"not compared: {report.not_compared}")
    return lines


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
