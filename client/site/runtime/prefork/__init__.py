"""Prefork: each ClientApp message runs in a process that is forked from one with its imports done.

Flower starts a `flwr-clientapp` process for every message; 3 s of that are imports. Our SuperNode (`../supernode.py`)
hands the task to the *template process* over a Unix socket instead. So does `shim.py`, the `flwr-clientapp` that a
SuperNode of Flower's own finds first on its PATH, and that ours starts where there is no template process::

    SuperNode or shim.py  ~~socket~~  template.py (imports done, never runs a task)
                      ~~~~~~~~~~~~~~~~~~~  `- watchdog.py, one per message (forked)
                                                `- worker.py (forked): Flower's own clientapp entry
                                                   ~~socket~~  persistent.py, one per run: the app

The template process only accepts and forks. The watchdog waits for the worker:

* it forwards a shim's signals;
* it ends the worker when the process that handed the task over is gone, or when the message's time to live is over;
* it answers the message with an error if the worker died without a reply (killed for memory, a crash in native code):
  otherwise the silo would be free only after Flower's heartbeat timeout;
* it reports to the shim how the worker ended.

Every message has a process of its own, as in Flower, that pulls it, checks pins and policy, logs what leaves and sends
it. The app itself runs in a process that is kept for the run's next message. If the template process dies, running
messages go on. If no template process answers, the shim starts a watchdog, which forks a worker that does its own
imports.

Read in this order: `shim.py` and `template.py`, the two ends of the socket; `watchdog.py` with `handover.py` (what
comes over the socket) and `reply.py` (its reply for a worker that died); `worker.py` with `wrappers.py` (our changes to
Flower there), `calls.py` (its calls to the SuperNode), `../../trust/pins.py` (which apps may run), `unpack.py` and
`persistent.py`. `install.py` writes the scripts for a silo's PATH.

Python takes an app module from `sys.modules` first. A template process that had imported the package `client` would run
the installed code instead of the app's. Therefore `client/site/private.py` loads the folder `client/site` as the
package `silofl_site`, a name that no app has. Code that runs here imports its neighbours relatively, and otherwise only
the standard library and third-party packages. Our own processes import it as `client.site`. Before the fork nothing is
computed and CUDA is not used.

Environment:
    SILOFL_WARM_SOCKET   the template process's socket; empty: Flower's own start, without a warning
    SILOFL_WARM_RESPAWN  0: a shim that finds no template process does not start one
    SILOFL_WARM_LOG      the log of a template process that a shim started; default: beside the socket
    SILOFL_RESIDENT_MINUTES  how long a process is kept without a message (10); 0: none is kept
    SILOFL_ALLOWED_APPS  a file of SHA-256 sums, or sums separated by commas; unset or empty: any app runs

Linux only; elsewhere use Flower's own start.
"""
