"""Runs a script as a pod of a JobSet. Arguments: what the cluster knows, the script, its arguments.

JAX asks the cluster which pods there are, through the package `kubernetes`. Here, that package is this file: it
gives the answers that the API server of a cluster would give.
"""

import json
import os
import runpy
import sys
from types import SimpleNamespace as Some

_, text, *sys.argv = sys.argv
ABOUT = json.loads(text)
SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"


class Core:
    def list_namespaced_pod(self, namespace, field_selector):
        wanted = field_selector.removeprefix("status.podIP=")
        found = [name for name, address in ABOUT["pods"].items() if address == wanted]
        owner = Some(controller=True, kind="Job")
        return Some(
            items=[
                Some(
                    metadata=Some(
                        name=n, labels={"job-name": ABOUT["job"]}, owner_references=[owner]
                    ),
                    spec=Some(subdomain=ABOUT["jobset"]),
                )
                for n in found
            ]
        )


class Batch:
    def read_namespaced_job(self, name, namespace):
        assert name == ABOUT["job"] and namespace == "default"
        labels = {"jobset.sigs.k8s.io/jobset-name": ABOUT["jobset"]}
        return Some(
            metadata=Some(name=name, labels=labels), spec=Some(parallelism=ABOUT["parallelism"])
        )


os.makedirs(SECRETS)  # in the memory of this host
with open(f"{SECRETS}/namespace", "w") as file:
    file.write("default")
sys.modules["kubernetes"] = Some(
    config=Some(load_incluster_config=lambda: None),
    client=Some(CoreV1Api=Core, BatchV1Api=Batch, exceptions=Some(ApiException=OSError)),
)
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
