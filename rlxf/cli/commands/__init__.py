"""Commands of ``rlxf``, and the table of all commands.

The module of a command is imported only when the command is given, so that help appears quickly.
"""

COMMANDS = {
    "train gtrxl": "rlxf.cli.commands.train_gtrxl:TrainGTrXL",
    "train dt": "rlxf.cli.commands.train_offline:TrainDecisionTransformer",
    "train bc": "rlxf.cli.commands.train_baselines:TrainBehaviorCloning",
    "train rvs": "rlxf.cli.commands.train_baselines:TrainReturnConditionedMLP",
    "resume": "rlxf.cli.commands.resume:Resume",
    "evaluate": "rlxf.cli.commands.evaluate:Evaluate",
    "plot": "rlxf.cli.commands.plot:Plot",
    "compare": "rlxf.cli.commands.compare:Compare",
    "baseline": "rlxf.cli.commands.baseline:Baseline",
    "experiment": "rlxf.cli.commands.experiment:Experiment",
    "sweep": "rlxf.cli.commands.sweep:Sweep",
    "estimate": "rlxf.cli.commands.estimate:Estimate",
    "pretrain": "rlxf.cli.commands.train_offline:Pretrain",
    "distill": "rlxf.cli.commands.distill:Distill",
    "calibrate": "rlxf.cli.commands.calibrate:Calibrate",
    "export": "rlxf.cli.commands.export:Export",
    "play": "rlxf.cli.commands.play:Play",
    "attention": "rlxf.cli.commands.attention:AttentionPage",
    "pack": "rlxf.cli.commands.pack:Pack",
    "push": "rlxf.cli.commands.push:Push",
    "pull": "rlxf.cli.commands.pull:Pull",
    "collect": "rlxf.cli.commands.datasets:Collect",
    "datasets": "rlxf.cli.commands.datasets:Datasets",
    "tuned": "rlxf.cli.commands.tuned:Tuned",
    "techniques": "rlxf.cli.commands.techniques:Techniques",
}
"""Words of a command -> import path of the dataclass of its options."""

SUMMARIES = {
    "train": "Train an agent.",
    "train gtrxl": "Train a Gated Transformer-XL with PPO on a Gymnasium task.",
    "train dt": "Train a Decision Transformer on Minari datasets.",
    "train bc": "Train behavior cloning on Minari datasets.",
    "train rvs": "Train a return-conditioned multilayer perceptron on Minari datasets.",
    "resume": "Resume an interrupted run.",
    "evaluate": "Evaluate the agent of a run over whole episodes.",
    "plot": "Plot learning curves of runs, with intervals over seeds.",
    "compare": "Compare the final scores of runs over seeds.",
    "baseline": "Train PPO or RecurrentPPO of Stable-Baselines3, or play random actions.",
    "experiment": "Train agents on tasks with several seeds, and compare them in one table.",
    "sweep": "Search for hyperparameters of a training command with Optuna.",
    "estimate": "Estimate the return of the agent of a run from logged episodes.",
    "pretrain": "Pre-train weights by masked token prediction on trajectories.",
    "distill": "Distill the agent of a run into a smaller student.",
    "calibrate": "Calibrate the early-exit threshold of the agent of a run.",
    "export": "Write the agent of a run as a file that runs without rlxf.",
    "play": "Show the agent of a run acting in its environment.",
    "attention": "Write a page that shows what the agent of a run attends to.",
    "pack": "Copy the agent of a run into a small folder to share.",
    "push": "Upload the agent of a run to the Hugging Face Hub.",
    "pull": "Download an agent from the Hugging Face Hub.",
    "collect": "Record agents or a random policy into a Minari dataset.",
    "datasets": "List the Minari datasets on this machine, or inspect one of them.",
    "tuned": "List the tuned settings of tasks, or print those of one task.",
    "techniques": "List the techniques that a transformer can be built from.",
}
"""Words of a command or group -> its line in the overview of commands."""
