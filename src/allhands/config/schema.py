"""The keys of a run file, with their types and defaults. The defaults are the digits job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

# Strict, so that `workers: true` or `num_epochs: 1.5` is an error and not a 1.
Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[FiniteFloat, Field(strict=True, gt=0)]
Flag = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """A part of a run file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Named(BaseModel):
    """Something chosen by name, with the options of what the name stands for: ``{name: adamw, lr:
    0.01}``.

    A plain string is short for ``{name: …}``. Which options there are is known only to what is
    named, so they are checked when it is made.
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    name: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name, in the order in which it was written."""
        return dict(self.model_extra or {})


class Data(Section):
    """The data set; its parts become the loaders ``train`` and ``valid``, built in the workers."""

    name: str = Field(
        default="digits",
        description="a set of the catalogue (digits, mnist, cifar10, cifar100, shakespeare), or a "
        "function: package.module:name, data.py:name",
    )
    root: str | None = Field(
        default=None, description="folder of its files; null looks in ALLHANDS_DATA"
    )
    batch_size: Count = Field(default=32, description="samples per worker and micro-batch")
    num_workers: Whole = Field(default=0, description="loader processes per worker")
    drop_last: Flag = Field(default=False, description="leave out a last batch that is not full")
    limit: Count | None = Field(
        default=None, description="use only the first so many samples of each part"
    )
    normalize: Flag | None = Field(
        default=None, description="images: subtract the mean; null takes the set's default"
    )
    labels: Literal["fine", "coarse"] | None = Field(
        default=None, description="cifar100: which labels; null: fine"
    )
    block: Count | None = Field(
        default=None, description="shakespeare: characters in a sample; null: 128"
    )
    options: dict[str, Any] = Field(
        default={}, description="further arguments of the function that `name` names"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Model(Named):
    """A model of `allhands.models`, or a class or function: package.module:name, net.py:Net; other
    keys are its arguments. Sizes that the data set decides are filled in."""

    name: str = Field(default="simple_cnn", min_length=1)


class Criterion(Named):
    """A loss: cross_entropy, next_token (of the gpt), mse, l1, …, a class of torch.nn such as
    HuberLoss, or a class or function: losses.py:Focal; other keys are its arguments.

    A class is called with them. A function without other keys is the loss itself.
    """

    name: str = Field(default="cross_entropy", min_length=1)


class Optimizer(Named):
    """An optimizer of torch.optim, or muonadamw, in any spelling of capitals, or a class or
    function: optim.py:Lion; other keys are its arguments.

    A class gets the parameters of the model, a function the model.
    """

    name: str = Field(default="adamw", min_length=1)
    lr: Positive | None = Field(
        default=None, description="learning rate; null takes PyTorch's default for this optimizer"
    )


class Scheduler(Named):
    """A class of torch.optim.lr_scheduler, or a class or function that gets the optimizer:
    optim.py:Warmup; other keys are its arguments.

    ``total_steps`` (OneCycleLR) and ``T_max`` (CosineAnnealingLR) are filled in with the length of
    the training. ``schedulers`` (SequentialLR, ChainedScheduler) are sections of this kind.
    """

    period: Literal["step", "epoch"] | None = Field(
        None,
        description="when it steps; null: each step for OneCycleLR and CyclicLR, else each epoch",
    )


class Metric(Named):
    """accuracy, a class of torchmetrics, or a class or function: metrics.py:top5; other keys are
    its arguments. ``num_classes`` and ``task`` are filled in where the data set is in the
    catalogue."""

    label: str | None = Field(
        default=None, description="under which it is reported; null takes the name"
    )


class Callback(Named):
    """AveragedWeights, EarlyStopping, Freeze, KeepBest, StopAfter, or a class:
    callbacks.py:Announce; other keys are its arguments."""


class Tracker(Named):
    """WandbLogger, MLflowLogger, or a class below allhands.Logger: net.py:Send; other keys are its
    arguments."""


class Runner(Named):
    """Who takes the steps: supervised, or a class below allhands.Runner or SupervisedRunner:
    steps.py:GAN; other keys are its arguments."""

    name: str = Field(default="supervised", min_length=1)


class Loop(Named):
    """A function that trains with an allhands.Loop: own.py:train. It gets the loop, what its
    arguments name of the run (num_epochs, max_steps, criterion, metrics), and the other keys."""


class Strategy(Named):
    """What the workers exchange, and when: single, dp, ddp, kvstore, local_sgd, fsdp, tensor,
    pipeline or federated.

    Other keys are its settings. On a mesh, `fsdp`, `tensor` and `pipeline` are sections with the
    settings of the other parts.
    """

    name: str = Field(default="ddp", min_length=1)


class Mesh(Section):
    """How many workers lie along each axis, for the strategies ddp, fsdp, tensor and pipeline; they
    multiply to all of them."""

    pp: Count = Field(default=1, description="stages of a pipeline")
    dp: Any = Field(
        default=1,
        description="shares of the samples: a whole number, of shards with fsdp and else of "
        "copies; or {replicate: 2, shard: 4}",
    )
    tp: Count = Field(default=1, description="slices of layers")


class EarlyStopping(Section):
    """Stop when the validation metric has not improved for a while."""

    patience: Count = Field(description="epochs without improvement before stopping")
    metric: str | None = Field(default=None, description="loss or a metric; null takes main_metric")
    min_delta: Annotated[FiniteFloat, Field(strict=True, ge=0)] = Field(
        default=0.0, description="smallest improvement"
    )


class RunConfig(Section):
    """A whole run."""

    @model_validator(mode="before")
    @classmethod
    def _epochs_or_steps(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("num_epochs") is not None:
            return value
        if value.get("max_steps") is not None:
            return {**value, "num_epochs": None}
        return {key: item for key, item in value.items() if key != "num_epochs"}

    data: Data = Data()
    model: Model = Model()
    criterion: Criterion = Criterion()
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler | None = Field(
        default=None, description="learning-rate schedule; null keeps the rate"
    )
    metrics: list[Metric] | None = Field(
        default=None,
        description="what is measured beside the loss; null: accuracy where the criterion is "
        "cross_entropy or nll, else nothing",
    )
    callbacks: list[Callback] = Field(default=[], description="hooks into the training")
    loggers: list[Tracker] = Field(default=[], description="where the numbers go beside the logdir")
    runner: Runner = Runner()
    loop: Loop | None = Field(
        default=None, description="a loop of your own, in place of the runner; null: the runner's"
    )
    strategy: Strategy = Strategy()
    mesh: Mesh | None = Field(
        default=None,
        description="workers along each axis; null: all of them along the strategy's own",
    )
    workers: Count | None = Field(
        default=None,
        description="processes to start; null: as many as the mesh has, or one a GPU, or a core "
        "without GPUs",
    )
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="null takes GPUs where there are some"
    )
    num_epochs: Count | None = Field(
        default=10,
        description="epochs in all, those of a resumed checkpoint included; null: 10, or no bound "
        "where max_steps is given",
    )
    max_steps: Count | None = Field(
        default=None,
        description="optimizer steps in all; with num_epochs too, whichever comes first ends the "
        "training",
    )
    steps_per_epoch: Count | None = Field(
        default=None,
        description="optimizer steps of an epoch; the next goes on in the data; null: one pass "
        "over the data",
    )
    evaluate_every: Count | None = Field(
        default=None,
        description="optimizer steps between two evaluations, each with a row and a checkpoint; "
        "null: at the end of each epoch",
    )
    seed: Whole = Field(
        default=42,
        description="decides initial weights, sample order, dropout and loader processes",
    )
    accumulate: Count = Field(default=1, description="micro-batches in one optimizer step")
    clip_norm: Positive | None = Field(
        default=None, description="bound of the global gradient norm"
    )
    precision: Literal["fp32", "bf16", "bf16-true", "fp8", "fp16"] = Field(
        default="fp32",
        description="number format of the forward pass; bf16-true: of all that the model computes; "
        "fp8: that, with products of linear layers in float8",
    )
    step: Literal["auto", "eager", "compile", "graph"] = Field(
        default="auto",
        description="on GPUs: record a step in a CUDA graph (graph), where it can be (auto), or "
        "never (eager); compile: compile the model first, then auto",
    )
    activation_checkpointing: Flag | str | list[str] = Field(
        default=False,
        description="compute layers again in the backward pass, to keep less: true, the name of a "
        "class, or a list of names",
    )
    logdir: str | None = Field(
        default="logs/run",
        description="folder for checkpoints, metrics.csv, TensorBoard and run.yml",
    )
    resume: str | None = Field(
        default=None, description="a checkpoint, or auto for the newest in logdir"
    )
    valid_loader: Literal["train", "valid"] | None = Field(
        default=None, description="whose metric decides; null takes valid"
    )
    main_metric: str = Field(
        default="loss", description="loss or a metric: decides which epoch is best"
    )
    minimize_metric: Flag | None = Field(
        default=None, description="whether smaller is better; null: for the loss only"
    )
    load_best_on_end: Flag = Field(default=False, description="end with the best epoch's weights")
    early_stopping: EarlyStopping | None = Field(
        default=None, description="when to stop early; null never does"
    )
    verbose: Flag = Field(default=True, description="draw a progress bar")
    check: Flag = Field(
        default=False, description="only 3 epochs of 3 steps, to see that all parts work"
    )
    overfit: Flag = Field(
        default=False, description="only the first step of each loader, in every epoch"
    )
    log_every: Count = Field(
        default=50, description="optimizer steps between two points in TensorBoard"
    )
    save_every: Count | None = Field(
        default=None, description="optimizer steps between checkpoints within an epoch"
    )
    save_minutes: Positive | None = Field(
        default=None, description="minutes between checkpoints within an epoch"
    )
    profile: Count | None = Field(
        default=None, description="record a timeline of so many optimizer steps into logdir/profile"
    )
