"""python -m flash_attention doctor: what works here, and the next step for what does not."""

import json

from flash_attention import devices
from flash_attention import doctor as diagnose

help = "say what works here, and the next step for what does not"


def add_arguments(parser):
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments):
    findings = diagnose()
    if arguments.json:
        print(json.dumps({"findings": findings, "devices": devices()}, indent=2))
        return 0
    for finding in findings:
        print(f"{'ok  ' if finding['ok'] else 'miss'}  {finding['subject']}: {finding['detail']}")
        if not finding["ok"] and finding["advice"]:
            print(f"      {finding['advice']}")
    return 0
