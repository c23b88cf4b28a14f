"""A fake worker process of the selftest: it reports checks that crash, hang and lose the device."""

import json
import sys
import time


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


tell(device={})
skipped = json.loads(sys.stdin.readline())["skip"]
for check in ("crashes", "hangs", "loses"):
    if check in skipped:
        continue
    tell(begin=check)
    if check == "crashes":
        tell(run={"name": "crashes with a schedule", "verdict": "FAIL", "operators": ["Relu"], "type": "f32"})
        print("out of order", file=sys.stderr, flush=True)
        sys.exit(3)
    if check == "hangs":
        time.sleep(60)
    tell(result={"name": check, "verdict": "FAIL", "operators": []})
    tell(lost="CUDA_ERROR_LAUNCH_FAILED")
    sys.stdin.read()
    sys.exit()
