"""The ledger: whatever order events end in, acknowledgements come in the order of offsets."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from streams.core.acknowledgement import AckTracker, Entry

Offset = tuple[int, int, int]  # partition, generation, offset


@given(
    lanes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=30),
    data=st.data(),
)
def test_what_is_acknowledged_is_a_prefix_and_in_the_end_everything_once(
    lanes: list[tuple[int, int]], data: st.DataObject
) -> None:
    tracker: AckTracker[Offset] = AckTracker()
    admitted: dict[tuple[int, int], list[Offset]] = {}
    acknowledged: dict[tuple[int, int], list[Offset]] = {}
    waiting = list(enumerate(lanes))
    in_work: list[Entry[Offset]] = []
    done: set[Offset] = set()
    # Admissions and completions come in any order, as they do under load.
    while waiting or in_work:
        if waiting and (not in_work or data.draw(st.booleans())):
            number, lane = waiting.pop(0)
            item = (*lane, number)
            admitted.setdefault(lane, []).append(item)
            in_work.append(tracker.admit(lane, item))
        else:
            entry = in_work.pop(data.draw(st.integers(0, len(in_work) - 1)))
            done.add(entry.item)
            for item in tracker.complete(entry):
                acknowledged.setdefault(item[:2], []).append(item)
        for lane, items in acknowledged.items():
            assert items == admitted[lane][: len(items)]
            assert done.issuperset(items)
        # Nothing waits for an event behind it either.
        for lane, items in admitted.items():
            finished = len(acknowledged.get(lane, []))
            assert finished == len(items) or items[finished] not in done
        assert len(tracker) == sum(map(len, admitted.values())) - sum(map(len, acknowledged.values()))
    assert acknowledged == admitted
    assert len(tracker) == 0


@given(
    lanes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=30),
    seed=st.randoms(use_true_random=False),
)
def test_an_abandoned_lane_is_never_acknowledged(lanes: list[tuple[int, int]], seed: Random) -> None:
    tracker: AckTracker[Offset] = AckTracker()
    entries = [tracker.admit(lane, (*lane, number)) for number, lane in enumerate(lanes)]
    tracker.clear()
    assert len(tracker) == 0
    seed.shuffle(entries)
    assert not [item for entry in entries for item in tracker.complete(entry)]
    assert len(tracker) == 0


def test_a_straggler_of_an_abandoned_lane_does_not_open_the_lane_that_took_its_place() -> None:
    # A drain may end without a new generation: the same partition is then read again under the same name.
    tracker: AckTracker[str] = AckTracker()
    straggler = tracker.admit((0, 7), "first reading")
    tracker.clear()
    again = tracker.admit((0, 7), "second reading")
    behind = tracker.admit((0, 7), "behind")
    assert list(tracker.complete(behind)) == []
    assert list(tracker.complete(straggler)) == []
    assert list(tracker.complete(again)) == ["second reading", "behind"]
