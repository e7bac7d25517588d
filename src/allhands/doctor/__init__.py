"""Looks for what would keep a job from running on this machine or on some hosts, and says what to
do about it.

`examine` asks a probe on each host (`probe`, `contact`), judges the answers (`machine`, `gpus`,
`network`, `job_folder` turn facts into findings) and runs a real all-reduce (`allreduce`). `render`
writes the findings down.
"""

from allhands.doctor.examination import Request, examine
from allhands.doctor.finding import Finding, Report

__all__ = ["Finding", "Report", "Request", "examine"]
