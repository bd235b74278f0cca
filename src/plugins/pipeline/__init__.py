# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as data.

    actions.py     F, B, I, W: what a schedule is made of
    schedules/     every schedule by name, one family per file
    from_file.py   a user's own
    messages.py    what is sent, and where in a rank's order
    validate.py    all that is wrong with a schedule, before it runs
    simulate.py    when everything happens, given costs
    choose.py      the best schedule for costs and a memory bound
    draw.py        pictures

Start with `schedules`: each function draws its schedule.
"""
