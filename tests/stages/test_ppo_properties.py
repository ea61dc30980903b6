"""What PPO for language models must get right, from the sampled token to the number that is logged.

The table says where each property of the specification is shown; P66 to P68 are matters of the stages at large.

P1   test_rollout::test_the_ratio_is_one_before_the_first_update_whatever_the_microbatch
     test_ppo_update::test_the_first_update_sees_minus_the_mean_advantage
     test_ppo_run::test_the_self_check_stops_a_run_and_names_the_cause
P2   test_ppo_update::test_at_learning_rate_zero_every_ratio_is_one_in_every_epoch_whatever_dropout_the_config_names
P3   test_rollout::test_policy_and_reference_with_equal_weights_have_no_kl
     test_train::test_the_first_rollout_has_no_kl_and_a_ratio_near_one
P4   P2 and P3 at temperature .7; test_models::test_logprobs_are_those_of_the_tokens_at_the_sampling_temperature
P5   test_ppo_run::test_nothing_that_bends_the_sampling_law_can_be_asked_for
P6   not applicable: the sampler gives no log-probabilities, they are made by the one function that the update uses
P7   test_models::test_logprobs_do_not_depend_on_left_padding_or_batch_mates
P8   test_ppo_update::test_values_do_not_depend_on_batch_mates
     test_models::test_a_score_is_the_same_alone_in_a_batch_and_padded_on_either_side
P9   test_a_token_is_judged_by_the_state_before_it
P10  test_ppo_objective::test_the_stop_token_counts_and_what_follows_does_not_even_if_pad_is_the_stop_token
P11  test_ppo_objective::test_a_response_without_stop_token_counts_whole_and_so_does_one_that_stops_in_the_last_slot
     test_rollout::test_a_response_that_ends_in_the_last_slot_has_ended
P12  test_rollout::test_a_prompt_that_contains_the_pad_id_is_attended_to
P13  test_ppo_objective::test_any_of_several_stop_tokens_ends_the_response
     test_any_stop_token_ends_a_rollout_and_none_of_them_lacks_an_eos
P14  test_ppo_update::test_empty_responses_are_one_action_each_and_leave_everything_finite; test_all_responses_empty
P15  test_a_rollout_holds_the_very_ids_that_were_sampled
P16  test_ppo_update::test_ids_after_the_end_change_not_one_bit
P17  test_ppo_update::test_junk_in_masked_slots_changes_not_one_bit; test_ppo_objective
P18  test_ppo_run::test_samples_of_a_prompt_lie_in_one_rollout_and_differ
     test_ppo_distributed::test_processes_draw_from_streams_of_their_own
P19  test_ppo_run::test_an_encoder_decoder_is_refused (we pad ourselves: a tokenizer's padding side plays no part)
P20  test_ppo_run::test_dropout_that_the_model_was_saved_with_is_off_in_rollout_and_update; P2; P26
P21  test_ppo_memory::test_what_has_no_effect_or_no_sense_is_refused (lora.dropout)
P22  test_ppo_layouts::test_both_adapters_learn_while_base_and_reference_stay_bit_for_bit
     test_adapters::test_both_of_two_adapters_learn_from_one_backward_pass
P23  test_ppo_update::test_ten_updates_leave_the_reference_as_it_was_and_move_policy_and_critic
P24  test_train::test_lora_sft_is_merged_so_that_ppo_starts_at_its_own_reference
P25  test_ppo_run::test_the_saved_critic_has_its_learned_head
     test_ppo_layouts::test_the_value_head_of_the_kept_policy_is_saved_in_a_file_of_its_own
     test_ppo_layouts::test_the_saved_critic_gives_the_values…
     test_models::test_a_missing_score_head_is_an_error_and_not_a_random_head
P26  test_ppo_memory::test_recomputed_layers_give_the_same_log_probabilities_and_gradients
     test_ppo_memory::test_a_rollout_of_recomputed_layers_uses_the_cache_and_draws_the_same
P27  test_ppo_run::test_reference_and_reward_model_are_the_same_after_the_run_and_never_had_a_gradient
P28  test_ppo_objective::test_token_rewards_golden
P29  test_ppo_objective::test_score_lands_on_the_last_counted_token_also_after_a_hole
     test_ppo_options::test_the_place_of_the_score
P30  test_the_kl_of_a_response_is_that_of_its_tokens_alone
P31  test_a_sharper_policy_has_positive_kl_on_average_and_negative_ones_are_kept; test_ppo_health (negative mean)
P32  test_ppo_options::test_kl_in_the_loss_is_reported_and_leaves_the_rewards_alone (kl is k1, kl_loss k2 or k3)
P33  test_ppo_options::test_the_adaptive_coefficient_is_updated_once_an_iteration_with_its_episodes
     test_ppo_objective::test_adaptive_kl_golden
P34  test_ppo_objective::test_gae_golden, …::test_gae_is_the_discounted_sum_of_all_later_errors
P35  test_ppo_objective::test_junk_outside_the_mask_changes_no_reward_advantage_or_whitened_value
P36  test_ppo_options::test_whitening_of_advantages_leaves_the_returns_alone_and_can_be_left_out
P37  test_ppo_objective::test_padding_takes_no_part_in_whitening
P38  test_ppo_objective::test_two_ranks_whiten_like_one
     test_ppo_distributed::test_whitening_and_score_moments_are_those_of_all_episodes
P39  test_ppo_objective::test_tokens_masked_inside_a_response_are_as_good_as_cut_out (no stage makes such tokens yet)
P40  test_rollout::test_an_answer_without_eos_pays_and_one_that_ends_in_the_last_slot_does_not
P41  test_ppo_options::test_scores_are_normalised_then_clipped_then_charged_for_a_missing_eos
     test_ppo_options::test_clipping_scores_leaves_the_kl_part_of_the_reward_alone, …::test_equal_scores…
P42  test_ppo_rewards::test_a_function_that_fails_is_named_with_the_row, …::test_a_model_whose_score_is_no_number_is…
P43  test_ppo_objective::test_clip_table, …::test_dual_clip_bounds_the_loss_of_a_bad_token
P44  test_ppo_objective::test_value_clip_table
P45  test_ppo_update::test_microbatches_change_neither_weights_nor_statistics
P46  test_ppo_distributed::test_two_processes_make_the_step_of_one
P47  test_ppo_run::test_optimiser_steps_are_iterations_times_epochs_times_minibatches
P48  test_ppo_update::test_gradients_are_forgotten_between_steps
P49  test_ppo_update::test_every_episode_is_used_once_an_epoch_in_an_order_of_its_own
P50  test_ppo_update::test_more_padding_on_either_side_changes_nothing
P51  test_ppo_update::test_the_gradient_norm_is_that_before_clipping_and_clipping_acts_on_the_whole_step
P52  test_the_entropy_of_a_uniform_model_is_log_v
P53  test_ppo_run::test_rollout_statistics_are_true_means
     test_ppo_update::test_statistics_of_an_update_are_means_over_all_tokens_of_all_steps
P54  test_ppo_options::test_ptx_adds_its_weight_times_the_language_modelling_gradient (weight 0 takes no text at all)
P55  test_ppo_options::test_kl_in_the_loss_adds_kl_coef_times_the_estimators_gradient
     test_ppo_objective::test_kl_estimators_by_enumeration
P56  test_ppo_update::test_log_ratios_of_a_hundred_leave_everything_finite; test_large_logits_stay_finite
P57  test_ppo_oracle
P58  test_ppo_bandit
P59  test_generation::test_first_tokens_follow_the_softmax_at_the_temperature, …leftover_generation_config…
P60  test_what_is_sampled_follows_the_weights
P61  test_a_rollout_leaves_no_trace_in_the_model
P62  not applicable: one engine, so nothing to correct for
P63  as P5: there is no greedy rollout to ask for
P64  test_ppo_run::test_more_tokens_than_positions_are_refused
P65  test_ppo_run::test_a_resumed_run_with_every_state_there_is_ends_like_an_unbroken_one
     test_ppo_layouts::test_two_iterations_and_two_more_after_a_kill_are_four
P69  test_ppo_distributed::test_an_evaluation_counts_each_of_an_odd_number_of_prompts_once_and_in_order
     test_ppo_distributed::test_a_rollouts_prompts_are_shared_without_doubles
P70  test_ppo_run::test_the_saved_policy_has_the_keys_it_started_with_and_its_own_generation_config
     test_ppo_layouts::test_the_policy_and_its_average_load_as_plain_language_models, …::test_the_merged_model_says…
P71  test_ppo_schedule::test_the_moving_average_…
P72  test_ppo_run::test_a_reward_model_that_reads_text_otherwise_is_refused_with_both_values
P73  test_ppo_schedule::test_a_run_that_went_too_far_is_marked_with_the_reason, …::test_the_best_score_within…
P74  test_ppo_run::test_prompts_that_are_all_too_long_are_refused_with_their_number
     test_train::test_a_single_prompt_cannot_be_split_and_is_refused
P75  test_rollout::test_the_score_is_that_of_prompt_and_response_alone
P76  as P33: episodes count there, not prompts
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppo_world import EOS, PROMPTS, make_rollout, roll, settings, tiny_scalar
from stages_world import sample, tiny_policy
from torch import Tensor, nn

from rlhf.stages.engines import Responses
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.ppo.shaping import shaped_scores, targets
from rlhf.stages.ppo.train import rollout_stats


class Counts(nn.Module):
    """A decoder that is sure that each token is one more than the token before."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.head = nn.Linear(num_tokens, num_tokens, bias=False)
        self.head.weight.data = 100 * torch.eye(num_tokens).roll(1, dims=0)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())

    def base_model(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = nn.functional.one_hot(input_ids, self.head.in_features).float()
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def test_a_token_is_judged_by_the_state_before_it() -> None:
    reader = PolicyModel(Counts(10))  # type: ignore[arg-type]
    ids = torch.tensor([[2, 3, 4, 5, 6], [8, 9, 0, 1, 2]])
    logprobs, _, _ = reader(ids, torch.ones_like(ids).bool(), 3, 1.0)
    assert logprobs.abs().max().item() < 1e-6
    off_by_one = torch.tensor([[3, 4, 4, 5, 6]])
    assert reader(off_by_one, torch.ones_like(off_by_one).bool(), 3, 1.0)[0].tolist() == [[-100, 0, 0]]


def test_the_entropy_of_a_uniform_model_is_log_v(policy: Any) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    ids = torch.tensor([[7, 8, 9, 10]])
    logprobs, entropy, _ = PolicyModel(policy)(ids, torch.ones_like(ids).bool(), 2, 0.7, with_entropy=True)
    assert entropy is not None
    assert entropy.tolist() == [pytest.approx([math.log(260)] * 2)]
    assert logprobs.tolist() == [pytest.approx([-math.log(260)] * 2)]


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_large_logits_stay_finite(policy: Any, scale: float) -> None:
    reader = PolicyModel(policy)
    reader.scale = scale
    ids = torch.tensor([[7, 8, 9, 10]])
    logprobs, entropy, _ = reader(ids, torch.ones_like(ids).bool(), 2, 0.7, with_entropy=True)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


# --- the rollout


def test_a_rollout_holds_the_very_ids_that_were_sampled(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ids that no tokenizer would make of their text: nothing is decoded and encoded again."""
    sampled = torch.tensor([[70, 71, 72], [259, 1, EOS]])
    found = Responses(sampled, torch.zeros(2, 3), torch.ones(2, 3).bool())
    monkeypatch.setattr(StaticEngine, "generate", lambda *_: found)
    rollout = roll(policy, policy, tiny_scalar(), settings(max_new_tokens=3), prompts=[[7, 8], [9]])
    assert torch.equal(rollout.responses, sampled)
    assert rollout.input_ids.tolist() == [[7, 8, 70, 71, 72], [EOS, 9, 259, 1, EOS]]
    assert rollout.attention_mask.tolist() == [[True] * 5, [False] + [True] * 4]


def test_any_stop_token_ends_a_rollout_and_none_of_them_lacks_an_eos(policy: Any) -> None:
    torch.manual_seed(0)
    stops = [EOS, *range(100, 160)]
    chosen = settings(max_new_tokens=6, temperature=2.0, missing_eos_penalty=3.0)
    rollout = roll(policy, policy, tiny_scalar(), chosen, stops, PROMPTS * 4)
    last = rollout.responses[torch.arange(32), rollout.lengths - 1]
    stopped = torch.isin(last, torch.tensor(stops))
    assert len({int(token) for token in last[stopped]}) > 3
    assert torch.equal(rollout.ended, stopped)
    assert not stopped.all()
    alone: Any = SimpleNamespace(settings=chosen, state={})
    expected = torch.where(stopped, rollout.scores, -3.0)
    assert torch.equal(shaped_scores(alone, rollout), expected)


def test_all_responses_empty(policy: Any) -> None:
    chosen = settings(max_new_tokens=6)
    rollout = roll(policy, policy, tiny_scalar(), chosen, stops=list(range(260)))
    assert rollout.lengths.tolist() == [1] * 8
    learned = targets(rollout, rollout.scores, 0.05, chosen)
    for numbers in (rollout.logprobs, rollout.values, rollout.scores, learned.advantages, learned.returns):
        assert numbers.isfinite().all()
    assert torch.allclose(learned.returns[:, 0], rollout.scores, atol=1e-5)


def test_a_rollout_leaves_no_trace_in_the_model(policy: Any) -> None:
    before = policy.config.to_dict(), policy.generation_config.to_dict(), policy.training
    roll(policy, policy, tiny_scalar(), settings(max_new_tokens=6))
    assert (policy.config.to_dict(), policy.generation_config.to_dict(), policy.training) == before
    assert all(p.requires_grad and p.grad is None for p in policy.parameters())


def test_what_is_sampled_follows_the_weights() -> None:
    """Greedy in the limit, from one model before and after its weights change, and from a fresh one with them."""
    model, other = tiny_policy(seed=0), tiny_policy(seed=1)
    first = sample(model, PROMPTS, 6, 1e-4, [], EOS)
    model.load_state_dict(other.state_dict())
    second = sample(model, PROMPTS, 6, 1e-4, [], EOS)
    assert not torch.equal(first, second)
    assert torch.equal(second, sample(other, PROMPTS, 6, 1e-4, [], EOS))


# --- KL


def test_the_kl_of_a_response_is_that_of_its_tokens_alone(policy: Any) -> None:
    rollout = make_rollout(policy, tiny_policy(seed=3), tiny_scalar())
    expected = [
        sum((rollout.logprobs[row, t] - rollout.ref_logprobs[row, t]).item() for t in range(int(length)))
        for row, length in enumerate(rollout.lengths)
    ]
    assert rollout.kl.tolist() == pytest.approx(expected, abs=1e-4)
    rollout.ref_logprobs = torch.where(rollout.mask, rollout.ref_logprobs, math.nan)
    assert rollout.kl.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_sharper_policy_has_positive_kl_on_average_and_negative_ones_are_kept() -> None:
    reference, policy = tiny_policy(), tiny_policy()
    policy.model.norm.weight.data *= 1.3  # the same preferences, held more firmly
    torch.manual_seed(0)
    rollout = roll(policy, reference, tiny_scalar(), settings(max_new_tokens=4, temperature=1.0), [], PROMPTS * 64)
    assert len(rollout.kl) == 512
    assert rollout.kl.mean().item() > 0.05
    assert rollout.kl.min().item() < 0
    stats = rollout_stats(_alone(), rollout, rollout.scores, rollout.values, 0.1, ["reward_model"])
    assert stats["kl"] == pytest.approx(rollout.kl.mean().item(), abs=1e-5)


# --- statistics


def test_statistics_of_known_episodes() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rows = torch.ones(2, 3)
    rollout = Rollout(
        input_ids=torch.ones(2, 3).long(), attention_mask=mask, mask=mask,
        logprobs=torch.tensor([[0.5, 0.25, 0.25], [2.0, 99, 99]]), ref_logprobs=0 * rows,
        sampled_logprobs=torch.tensor([[0.5, 0.5, 0.25], [1.85, 0, 0]]),
        entropy=torch.tensor([[1.0, 2, 3], [6, 99, 99]]), values=torch.tensor([[1.0, 1, 1], [3, 99, 99]]),
        scores=torch.tensor([4.0, -2]), reward_scores=torch.tensor([[4.0], [-2]]), ended=torch.tensor([True, False]),
    )  # fmt: skip
    shaped, returns = torch.tensor([2.0, -4]), torch.tensor([[1.0, 3, 1], [3, 77, 77]])
    stats = rollout_stats(_alone(), rollout, shaped, returns, 0.2, ["reward_model"])
    expected = {"score": 1, "score_std": 3, "kl": 1.5, "entropy": 3, "eos_share": 0.5, "length": 2}
    expected |= {"kl_per_token": 0.75, "non_score_reward": -0.3, "rlhf_reward": -1.3}
    # residuals 0, 2, 0, 0 (variance .75); returns 1, 3, 1, 3 (variance 1)
    expected |= {"explained_variance": 0.25, "sampler_gap": 0.1}  # gaps 0, .25, 0, .15
    assert {name: stats[name] for name in expected} == pytest.approx(expected)


def _alone() -> Any:
    """Of a `Runtime` in one process, what statistics need."""
    return SimpleNamespace(settings=settings(), state={}, sum=lambda x: x, max=lambda x: x)
