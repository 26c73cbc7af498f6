"""A training loop that is fed by servers, or by this machine alone without --remote.

On a machine without an accelerator the step stands for one: it takes --step-ms, and no processor.
"""

import argparse
import time
from pathlib import Path

import penstock


def main() -> None:
    """Train for a while, and say how fast it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--remote", nargs="+", help="servers, as host:port, or one file that lists them")
    parser.add_argument("--token-file", help="of the servers, if they are on other machines")
    parser.add_argument("--authority", help="that signed their certificates")
    parser.add_argument("--workers", type=int, default=1, help="processes of this machine, without --remote")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=60)
    arguments = parser.parse_args()
    plan = penstock.load_plan(Path("plan.toml"), allow_code=["augmentation"])
    if arguments.remote:
        servers = Path(arguments.remote[0]) if Path(arguments.remote[0]).exists() else arguments.remote
        security = penstock.Security(token_file=arguments.token_file, authority=arguments.authority)
        remote = penstock.Remote(servers=servers, security=security, timeout_seconds=60)
        loader = penstock.DataLoader(plan, remote=remote, epochs=None)
    else:
        loader = penstock.DataLoader(plan, num_workers=arguments.workers, epochs=None)
    begin = time.perf_counter()
    for step, batch in enumerate(loader, start=1):
        assert batch["image"].shape[1:] == (3, 96, 96)
        time.sleep(arguments.step_ms / 1000)  # the accelerator computes
        if step == arguments.steps:
            break
    seconds = time.perf_counter() - begin
    print(f"{step / seconds:.1f} steps a second; {step * arguments.step_ms / 1000 / seconds:.0%} of it computing")
    loader.close()


if __name__ == "__main__":
    main()
