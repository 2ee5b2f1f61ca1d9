"""The site's process takes what both ends say from its own installation, and with it neither Flower nor the house."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from client.protocol import private

ROOT = Path(private.__file__).parents[2]
LOADED = textwrap.dedent("""
    import importlib, sys
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    root, app = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, app)
    spec = spec_from_file_location("private", root / "client/protocol/private.py")
    private = module_from_spec(spec)
    spec.loader.exec_module(private)
    private.load_site()
    for file in sorted((root / "client/protocol").rglob("*.py")):
        name = ".".join(file.relative_to(root / "client").with_suffix("").parts)
        importlib.import_module("silofl_site." + name.removesuffix(".__init__"))
    ours = [name for name in sys.modules if name.startswith("silofl_site.")]
    print(len(ours) > 20, all(Path(getattr(sys.modules[name], "__file__", None) or root).is_relative_to(root)
                              for name in ours))
    first = {name.partition(".")[0] for name in sys.modules}
    print(sorted(first & {"client", "partitions", "strategies", "models", "server", "flwr", "torch", "numpy", "grpc"}))
    import client.protocol.policy as of_app
    print(Path(of_app.__file__).is_relative_to(app), sys.modules["silofl_site.protocol.policy"].PUBLIC)
""")


def test_an_app_does_not_replace_a_module_of_the_sites_process(tmp_path):
    """Whatever lies in the app under the names of ours, also under the private one, and wherever it stands."""
    app, names = tmp_path / "app", ("client", "partitions", "silofl_site")
    for file in (ROOT / "client/protocol").rglob("*.py"):
        for name in ("client", "silofl_site"):
            plant(app / name / file.relative_to(ROOT / "client"))
    for file in (ROOT / "partitions/common").glob("*.py"):
        plant(app / file.relative_to(ROOT))
        plant(app / "silofl_site/partitions_common" / file.name)
    for name in names:
        plant(app / name / "__init__.py")
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED, str(ROOT), str(app)],
        capture_output=True,
        text=True,
        check=False,
        cwd=app,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True True", "[]", "True public"]


def plant(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in [file.parent, *file.parent.parents[:3]]:
        if folder.name and not (folder / "__init__.py").exists() and "app" in folder.parts:
            (folder / "__init__.py").touch()
    file.write_text('PUBLIC = "replaced"\n')
