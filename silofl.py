"""silofl in a notebook or a script: read a run directory as pandas frames, models and plots.

    import silofl

    run = silofl.load_run("runs/study")
    run.runs                                              # a row per method and seed
    run.silos.pivot(index="silo", columns="strategy", values="score")
    run.plot_rounds()
    run.model("hospital-03", strategy="apple").predict("new-patients.npz")

Everything else is reached by the command ``silofl``, which ``python -m silofl`` is too, and by ``flwr run``.
"""

if __name__ == "__main__":  # python -m silofl
    from server.cli.main import main

    raise SystemExit(main())

from partitions.common.errors import DataError, UserError
from server.notebook import LoadedModel as Model
from server.notebook import Plot, Run, load_run

__all__ = ["DataError", "Model", "Plot", "Run", "UserError", "load_run"]
