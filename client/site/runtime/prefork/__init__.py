"""Prefork: each ClientApp message runs in a process forked from one that has its imports done.

Flower starts a `flwr-clientapp` process for every message; 3 s of that are imports. Our SuperNode (`../supernode.py`)
hands the task to the *template process* over a Unix socket instead. So does `shim.py`, the `flwr-clientapp` that a
SuperNode of Flower's own finds first on its PATH, and that ours starts where there is no template process::

    SuperNode or shim.py  ~~socket~~  template.py (imports done, never runs a task)
                      ~~~~~~~~~~~~~~~~~~~  `- watchdog.py, one per message (forked)
                                                `- worker.py (forked): Flower's own clientapp entry
                                                   ~~socket~~  persistent.py, one per run: the app

The template process only accepts and forks. The watchdog waits for the worker: it forwards a shim's signals, ends the
worker when who handed it over is gone or when the message's time to live is over, answers the message with an error
where the worker died without a reply (killed for memory, a crash in native code), so that the silo is free at once
instead of after Flower's heartbeat timeout, and tells the shim how the worker ended. Every message has a process of its
own, as in Flower, that pulls it, asks pins and policy, writes down what leaves and sends it; the app itself runs in one
that stays for the run's next message. The template process's death touches no running message. Where none answers, the
shim starts a watchdog by itself, which forks a worker that does its own imports.

Read in this order: `shim.py` and `template.py`, which meet at the socket; `watchdog.py` with `handover.py` (what comes
over the socket) and `reply.py` (what it says for a worker that died); `worker.py` with `wrappers.py` (what we change in
Flower there), `calls.py` (how it speaks with the SuperNode), `pins.py` (which apps may run), `unpack.py` and
`persistent.py`. `install.py` writes the scripts for a silo's PATH.

An app module is taken from `sys.modules` first, so a template process that had imported the package `client` would run
the installed code instead of the app's. Therefore these files run under a name that no app has:
`client/site/private.py` loads the folder `client/site` as the package `silofl_site`. What runs here imports its
neighbours relatively, and otherwise the standard library and third-party packages only. Our own processes import it as
`client.site`. Nothing is computed and CUDA is not touched before the fork.

Environment:
    SILOFL_WARM_SOCKET   the template process's socket; empty: Flower's own start, without a warning
    SILOFL_WARM_RESPAWN  0: a shim that finds no template process does not start one
    SILOFL_WARM_LOG      where a template process that a shim started writes; default: beside the socket
    SILOFL_RESIDENT_MINUTES  how long a process stays without a message (10); 0: none stays
    SILOFL_ALLOWED_APPS  a file of SHA-256 sums, or sums separated by commas; unset or empty: any app runs

Linux only; elsewhere use Flower's own start.
"""
