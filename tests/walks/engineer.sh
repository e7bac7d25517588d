#!/bin/sh
# An engineer's first hour with run files, in an empty folder: a first project, trained, measured,
# swept, compared. `sh engineer.sh`, with allhands[data,report] installed.
set -eu

allhands init rows project
cd project
allhands schema > run.schema.json

allhands run -C run.yml workers=1 num_epochs=3
allhands evalute logs/first || echo "exit code $?"
allhands evaluate logs/first
allhands predict logs/first -o rows.csv
allhands show logs/first

allhands sweep -C run.yml --over optimizer.lr=1e-3,1e-2 num_epochs=1
allhands compare logs/sweep/trial-001 logs/sweep/trial-002
