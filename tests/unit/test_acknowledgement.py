"""The tracker: whatever order events end in, acknowledgements come in the order of offsets."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from streams.core.acknowledgement import AckTracker, Entry

Queue = tuple[int, int]  # partition, generation


@given(
    queues=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=30),
    data=st.data(),
)
def test_what_is_acknowledged_is_a_prefix_and_in_the_end_everything(
    queues: list[Queue], data: st.DataObject
) -> None:
    tracker = AckTracker()
    begun: dict[Queue, list[int]] = {}
    acknowledged: dict[Queue, int] = {}  # how many of each queue
    waiting = list(enumerate(queues))
    running: list[tuple[Queue, Entry]] = []
    done: set[int] = set()
    # Beginnings and ends come in any order, as they do under load.
    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            offset, queue = waiting.pop(0)
            begun.setdefault(queue, []).append(offset)
            running.append((queue, tracker.begin(queue, offset)))
        else:
            queue, entry = running.pop(data.draw(st.integers(0, len(running) - 1)))
            done.add(entry.offset)
            last = tracker.complete(entry)
            before = acknowledged.get(queue, 0)
            if last is not None:
                acknowledged[queue] = begun[queue].index(last) + 1
                assert acknowledged[queue] > before
            # Everything up to the last is done, and nothing waits for an event behind it either.
            for own, offsets in begun.items():
                finished = acknowledged.get(own, 0)
                assert done.issuperset(offsets[:finished])
                assert finished == len(offsets) or offsets[finished] not in done
                assert tracker.unacknowledged(own) == len(offsets) - finished
        assert len(tracker) == sum(map(len, begun.values())) - sum(acknowledged.values())
    assert acknowledged == {queue: len(offsets) for queue, offsets in begun.items()}
    assert len(tracker) == 0


@given(
    queues=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=30),
    seed=st.randoms(use_true_random=False),
)
def test_a_cleared_queue_is_never_acknowledged(queues: list[Queue], seed: Random) -> None:
    tracker = AckTracker()
    entries = [tracker.begin(queue, offset) for offset, queue in enumerate(queues)]
    tracker.clear()
    assert len(tracker) == 0
    seed.shuffle(entries)
    assert {tracker.complete(entry) for entry in entries} <= {None}
    assert len(tracker) == 0


def test_a_straggler_of_a_cleared_queue_does_not_open_the_queue_that_took_its_place() -> None:
    # A drain may end without a new generation: the same partition is then read again under the same name.
    tracker = AckTracker()
    straggler = tracker.begin((0, 7), 10)
    tracker.clear()
    again = tracker.begin((0, 7), 10)
    behind = tracker.begin((0, 7), 11)
    assert tracker.complete(behind) is None
    assert tracker.complete(straggler) is None
    assert tracker.complete(again) == 11
