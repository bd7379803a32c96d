"""`make fuzz`: hostile messages to the decoder, and what came of them. Exit code 1 where something was found."""

import argparse
import secrets
import sys

from tests.fuzz.hunt import Hunt, hunt, our_judge
from tests.fuzz.mutations import hostile
from tests.fuzz.seeds import QUERIES, SUBJECTS, Subject

_MAX_REPORTED = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz FUZZ_ARGS=…", description=__doc__)
    parser.add_argument("--inputs", type=int, default=300_000, help="how many of each contract (%(default)s)")
    parser.add_argument("--seconds", type=float, help="end each after so long, if that is earlier")
    parser.add_argument("--contract", choices=SUBJECTS, help="only of this one")
    parser.add_argument("--seed", type=int, help="of an earlier run; a new one otherwise")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="write this message to standard output")
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if options.only is not None:
        subject = SUBJECTS[options.contract or QUERIES.name]
        sys.stdout.buffer.write(hostile(seed, options.only, subject))
        return 0
    print(f"seed {seed}", flush=True)
    chosen = [SUBJECTS[options.contract]] if options.contract else SUBJECTS.values()
    return max([_hunt(subject, seed, options.inputs, options.seconds) for subject in chosen])


def _hunt(subject: Subject, seed: int, inputs: int, seconds: float | None) -> int:
    """The exit code."""
    print(f"{subject.name}:", flush=True)
    reported = 0

    def report(so_far: Hunt) -> None:
        nonlocal reported
        for number, broken in so_far.found[reported : reported + _MAX_REPORTED]:
            print(f"! message {number}: {broken}", flush=True)
        reported = len(so_far.found)
        if so_far.inputs and so_far.inputs % 25_000 == 0:
            print(f"{so_far.inputs:>9,} messages, {len(so_far.found)} findings", flush=True)

    found = hunt(
        our_judge(subject), subject=subject, seed=seed, inputs=inputs, seconds=seconds, report=report
    )
    print(f"{found.inputs:,} messages, {found.bytes / found.inputs:,.0f} bytes each on average")
    for outcome, number in found.outcomes.most_common():
        print(f"  {outcome:<24}{number:>9,}")
    times, number = found.most
    print(f"most memory: {times:.1f} times the message beyond what is free (message {number})")
    report(found)
    if found.found:
        print(
            f"✗ {len(found.found)} findings; --seed {seed} --contract {subject.name} --only NUMBER writes the message"
        )
        return 1
    print("✓ nothing but our own errors, within bounds, as the contract says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
