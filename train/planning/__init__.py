"""`plan=true`: what a run needs, how long it takes and whether it will pay, said before it begins.

`devices` says what a device can do, `outline` counts the weights of a target and a draft from
their configs, `demand` works out memory, disk and seconds, `gain` what must be accepted for a
speedup, and `outlook` puts all of it together for a configuration and says it.
"""
