"""The software bill of materials: every locked package with its sums, the fields of CycloneDX 1.6, the same bytes."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from requirements.sbom import IMAGES, component, licences, sbom

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "silo": ["torch-cpu", "silo"],
    "silo-gpu": ["torch-cuda", "silo"],
    "server": ["torch-cpu", "silo", "server"],
}
# Not for Python 3.11 on Linux, which the images have.
ELSEWHERE = ("sys_platform == 'win32'", "python_full_version >= '3.12'")


def locked(image):
    """Name and version to the sums of what is installed in an image, line by line."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in FILES[image]:
        sums: list[str] = []
        for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines():
            if head := re.match(r"([a-z0-9-]+)==(\S+)(.*)", line):
                sums = []
                if not any(marker in head[3] for marker in ELSEWHERE):
                    found[head[1], head[2]] = sums
            elif "--hash" in line:
                sums.append(
                    line.strip().removesuffix("\\").strip().removeprefix("--hash=sha256:")
                )
    return found


def packages(content):
    """The same of a document."""
    listed = [one for one in content["components"] if one["type"] == "library"]
    return {
        (one["name"], one["version"]): [h["content"] for h in one["hashes"]] for one in listed
    }


@pytest.mark.parametrize("image", IMAGES)
def test_every_locked_package_is_there_with_its_sums(image):
    expected = locked(image)
    assert packages(sbom(image)) == expected
    assert len(expected) > 60 and all(expected.values())


def test_the_images_are_those_of_the_build():
    """The Dockerfile installs a part by its name; with an empty TORCH_INDEX it is PyTorch with CUDA."""
    text = (ROOT / "docker/Dockerfile").read_text()
    assert re.findall(r"sh /requirements/install\.sh (\w+)", text) == ["silo", "server"]
    assert {image: list(files) for image, files in IMAGES.items()} == FILES


@pytest.mark.parametrize("image", IMAGES)
def test_the_fields_that_cyclonedx_requires(image):
    content = sbom(image)
    assert (content["bomFormat"], content["specVersion"], content["version"]) == (
        "CycloneDX",
        "1.6",
        1,
    )
    every = [content["metadata"]["component"], *content["components"]]
    assert {one["type"] for one in every} == {"application", "container", "library"}
    assert all(one["name"] and one["version"] for one in every)
    references = [one["bom-ref"] for one in every]
    assert len(references) == len({*references})
    for one in packages(content):
        purl = f"pkg:pypi/{one[0]}@{one[1].replace('+', '%2B')}"
        assert [c["purl"] for c in content["components"] if c["bom-ref"] == purl] == [purl]
    hashes = [h for one in content["components"] for h in one.get("hashes", ())]
    assert all(
        h["alg"] == "SHA-256" and re.fullmatch(r"[0-9a-f]{64}", h["content"]) for h in hashes
    )
    [composition] = content["compositions"]  # the base image's packages are not in it
    assert composition == {"aggregate": "incomplete", "assemblies": [every[0]["bom-ref"]]}


def test_silofl_itself_with_its_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [own] = [one for one in sbom("silo")["components"] if one["name"] == "silofl"]
    assert own["version"] == project["version"]
    assert (
        own["licenses"]
        == [{"expression": "Apache-2.0"}]
        == [{"expression": project["license"]}]
    )
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def made(folder, **variables):
    """What `make sbom` writes."""
    clean = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-m", "requirements.sbom", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=clean | variables, check=True, capture_output=True, text=True
    )
    return {Path(name).name: Path(name).read_bytes() for name in done.stdout.split()}


def test_the_same_packages_give_the_same_bytes(tmp_path):
    first = made(tmp_path / "first", PYTHONHASHSEED="1")
    assert made(tmp_path / "second", PYTHONHASHSEED="2") == first
    version = metadata.version("silofl")
    assert sorted(first) == sorted(f"silofl-{image}-{version}.cdx.json" for image in IMAGES)
    for text in first.values():
        content = json.loads(text)
        assert "serialNumber" not in content and "timestamp" not in content["metadata"]
    dated = made(tmp_path / "dated", SOURCE_DATE_EPOCH="1795392000")
    times = {json.loads(text)["metadata"].pop("timestamp") for text in dated.values()}
    assert times == {"2026-11-23T00:00:00Z"}


@pytest.mark.parametrize(
    "file, images",
    [("silo", {*IMAGES}), ("server", {"server"}), ("torch-cuda", {"silo-gpu"}), ("dev", set())],
)
def test_a_package_that_is_planted_into_a_lock_file_is_found(tmp_path, file, images):
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = (
        f"left-pad==1.3.0 \\\n    --hash=sha256:{'ab' * 32} \\\n    --hash=sha256:{'cd' * 32}\n"
    )
    with (tmp_path / f"requirements/{file}.txt").open("a") as lock:
        lock.write(planted)
    found = {
        image: packages(sbom(image, tmp_path / "requirements")).get(("left-pad", "1.3.0"))
        for image in IMAGES
    }
    assert {image for image, sums in found.items() if sums} == images
    assert all(sums == ["ab" * 32, "cd" * 32] for sums in found.values() if sums)


def test_a_licence_is_the_installed_packages_own():
    installed = metadata.version("flwr")
    assert list(licences("flwr", installed)) == [{"expression": "Apache-2.0"}]
    assert list(licences("flwr", "0.0.1")) == []  # another version may have another one
    assert list(licences("left-pad", "1.3.0")) == []
    assert "licenses" not in component(f"left-pad==1.3.0 --hash=sha256:{'ab' * 32}\n")
    # Of the whole text of a licence only what the classifiers name.
    assert list(licences("matplotlib", metadata.version("matplotlib"))) == [
        {"license": {"name": "Python Software Foundation License"}}
    ]


def test_a_release_has_it():
    makefile = (ROOT / "Makefile").read_text()
    release = makefile.partition("\nrelease:")[2].partition("\n\n")[0]
    assert "-m requirements.sbom dist" in release
