"""A suite as a Kubernetes TrainJob (Kubeflow Trainer v2): the manifest, for `kubectl apply`.

Trainer starts one pod a node, each with torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...). The
first pod runs the harness, the others serve it: see harness.launch.pods. Results lie on a volume that the runtime
mounts in all pods.

The fields are those of trainer.kubeflow.org/v1alpha1's TrainJob.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import yaml

from harness.launch import pods
from harness.submit import Job

API_VERSION = "trainer.kubeflow.org/v1alpha1"
_GPU = "nvidia.com/gpu"


def manifest(job: Job, *, image: str, runtime: str, device: str) -> str:
    """The YAML text. `runtime` is the ClusterTrainingRuntime that the pods are made by; on GPUs each rank has one."""
    trainer: dict[str, Any] = {
        "image": image,
        "command": ["python", "-m", "harness"],
        "args": list(job.command),
        "numNodes": job.num_nodes,
        "numProcPerNode": job.ranks_per_node,
    }
    trainer["env"] = [{"name": pods.KEY_VARIABLE, "value": secrets.token_hex(16)}]
    if device == "cuda":
        trainer["resourcesPerNode"] = {"limits": {_GPU: job.ranks_per_node}}
    content = {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": {"name": name_of(job)},
        "spec": {
            "runtimeRef": {"name": runtime},
            "activeDeadlineSeconds": round(job.limit_seconds),
            "trainer": trainer,
        },
    }
    return str(yaml.safe_dump(content, sort_keys=False, width=120))


def name_of(job: Job) -> str:
    """The job's name as Kubernetes takes it: at most 63 lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", job.name.lower())[:63].strip("-")
