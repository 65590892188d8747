"""The only room that touches private names of torch (and of torchdata, which repeats them).

It sees iterators being made, measures their waits, notices dead workers, and knows how to take
an iterator apart. Undo stands beside do: `instrument()` and `uninstrument()`.

NOTE [ Dead workers ]
torch registers the pids of its workers in C, and its SIGCHLD handler raises as soon as one of them
fails, wherever the main thread is at that moment. In a notebook that is the event loop, and the
kernel dies. So the pids of guarded iterators are taken out. Instead each wait for a batch watches the
workers' pidfds too, and a batch is read so that half a message, left by a worker that was killed
in its midst, cannot block: see queues.Inbox.

NOTE [ Stop order ]
1. no SIGCHLD errors from here on; 2. the pin-memory thread is told and ends first: workers that are
killed before it can leave half a message, on which its join hangs for ever (pytorch #21554); 3. the
done event is set and every worker gets its farewell; 4. processes.stop: grace, SIGTERM, SIGKILL, in
parallel and within one deadline; 5. queues, feeder threads and processes are given back. torch's
own `_shutdown_workers` is not used: it joins for 5 s per worker, one after the other, and a worker
that was killed inside of `Event.is_set()` holds the event's lock for ever, so that its `set()` hangs.
"""

from .instrument import WAITING, adapter, is_loader_frame

__all__ = ["WAITING", "adapter", "is_loader_frame"]
