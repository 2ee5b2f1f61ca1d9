"""Print what an image installs: `[project].dependencies` of pyproject.toml without what its part does not use.

    python3 docker/requirements.py silo|server < pyproject.toml

The versions stand in pyproject.toml alone. That a silo imports nothing of what is left out is a test
(tests/server/deploy/test_compose.py).
"""

import re
import sys
import tomllib

# A silo reads its own file and trains; it downloads no public data set and draws no report.
LEFT_OUT = {"server": {"ray"}, "silo": {"ray", "torchvision", "medmnist", "scikit-learn", "scipy", "matplotlib"}}


def requirements(part: str, pyproject: str) -> list[str]:
    """The requirements of one image, one per entry, in the order of pyproject.toml."""
    kept = []
    for requirement in tomllib.loads(pyproject)["project"]["dependencies"]:
        # Flower's extra brings Ray, which simulates silos; here they are real.
        plain = requirement.replace("[simulation]", "")
        name = re.split(r"[^A-Za-z0-9_.-]", plain, maxsplit=1)[0].lower()
        if name not in LEFT_OUT[part]:
            kept.append(plain)
    return kept


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], sys.stdin.read())))
