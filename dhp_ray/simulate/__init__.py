"""Discrete-event simulation of training on a described cluster: many batches, the planner's own plans, late plans,
stragglers and faults.

    settings -> workload -> batches                      samples of a step, the same for all planners
             -> machine -> place                         ranks, mode, tokens and costs of a membership
    SimulatedRun: dispatcher -> plan -> simulate_step -> record       for each batch, through generations
    records -> summary -> table, results.json, picture, trace

Everything is modelled and nothing is measured; the same settings give the same result.
"""
