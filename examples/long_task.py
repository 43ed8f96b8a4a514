"""A task of forty minutes under a lease of thirty seconds: extended while it works, taken over soon if it dies.

While the handler works, `run` extends the lease after each third of it. So a short lease costs nothing. If this process
is killed, another one starts the task half a minute later, not forty. A plain function runs in a thread.

    timeline serve
    python examples/long_task.py

TASK_S=4 LEASE_S=2 make it forty chapters in four seconds.
"""

import os
import time

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
TASK_S = float(os.environ.get("TASK_S", "2400"))
LEASE_S = float(os.environ.get("LEASE_S", "30"))
CHAPTERS = 40


def encode_video(d: timeline.SyncDelivery) -> None:
    print(f"{d.id}: delivery {d.deliveries}, the lease ends in {LEASE_S:g} s", flush=True)
    for chapter in range(CHAPTERS):
        if d.lost:  # the broker was away for a whole lease: another worker may have it now
            raise timeline.Retry(reason=f"lost before chapter {chapter}")
        time.sleep(TASK_S / CHAPTERS)
    # The upload cannot look at d.lost. So ask for enough time at once; a lost lease raises here.
    until = d.extend(max(LEASE_S, 600))
    print(f"{d.id}: encoded, uploading until {until:%H:%M:%S} at the latest", flush=True)


def main() -> None:
    with timeline.connect_sync(ADDRESS) as tl, tl.producer("videos") as p:
        tl.create_topic("videos")
        p.produce(b"holiday.mov", in_=0, id="holiday")
        with tl.consumer("videos", lease=LEASE_S) as c:

            def encode_one(d: timeline.SyncDelivery) -> None:
                encode_video(d)
                c.stop_taking()  # a real worker takes the next one

            c.run(encode_one, concurrency=2)  # the second one would get the task if its lease ran out
        print("done" if tl.get("videos", "holiday") is None else "not done")


if __name__ == "__main__":
    main()
