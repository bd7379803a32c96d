"""Writes Prometheus's rules and Grafana's dashboards: `make observability`, or for another deployment

python -m k8s.observability --workers 4 --runbook-url https://… --dashboard-url https://… --output …
"""

import argparse
from pathlib import Path

from k8s.observability import dashboards, rules

_HERE = Path(__file__).parent


def main() -> None:
    defaults = rules.Parameters()
    parser = argparse.ArgumentParser(
        prog="python -m k8s.observability", description="Write Prometheus's rules and Grafana's dashboards."
    )
    parser.add_argument("--jobs", default=defaults.jobs, help="regular expression of the workers' job names")
    parser.add_argument(
        "--workers", type=int, default=defaults.workers, help="number of workers that must be ready"
    )
    parser.add_argument(
        "--embedder-jobs",
        default=defaults.embedder_jobs,
        help="regular expression of the job names of embedding stages",
    )
    parser.add_argument("--runbook-url", default=defaults.runbook_url, help="absolute URL of the runbook")
    parser.add_argument("--dashboard-url", default=defaults.dashboard_url, help="absolute URL of Grafana")
    parser.add_argument(
        "--compress",
        type=float,
        default=defaults.compress,
        help="divide all intervals, windows and durations by this factor (for tests)",
    )
    parser.add_argument("--output", type=Path, default=_HERE, help="folder to write to")
    options = vars(parser.parse_args())
    output: Path = options.pop("output")
    parameters = rules.Parameters(**options)
    files = {"prometheus/rules.yml": rules.render(parameters)} | {
        f"grafana/dashboards/{name}": text for name, text in dashboards.render(parameters).items()
    }
    for name, text in files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
