"""What τ²-Bench gives to those who do not think: print it beside every score.

  nothing   ends the attempt at once; airline has many tasks that ask for no
            change, so this is far from zero there
  blind     telecom_solo: every repair that does no harm where nothing is
            broken, in one order, without a look at anything
  reading   telecom_solo: a script by hand that reads account and device once,
            and repairs what differs from a sound one

The third shows what is reached by reading alone; what it does not reach needs
more than one look.
"""

from collections.abc import Callable, Mapping
import json

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.tau2 import oracles as tau2_oracles

Script = Callable[[benchmark.Attempt], None]

CUSTOMER, LINE = 'C1001', 'L1002'  # the same in every task
_ACCOUNT = {'customer_id': CUSTOMER, 'line_id': LINE}
_MODE = {'mode': '4g_5g_preferred'}
_MESSAGING = 'messaging'
_PERMISSIONS = ('sms', 'storage')
_BLIND = (
  ('reseat_sim_card', {}),
  ('set_network_mode_preference', _MODE),
  ('enable_roaming', _ACCOUNT),
  ('disconnect_vpn', {}),
  *(
    ('grant_app_permission', {'app_name': _MESSAGING, 'permission': name})
    for name in _PERMISSIONS
  ),
  ('reset_apn_settings', {}),
  ('reboot_device', {}),
)


def scripts(category: str) -> Mapping[str, Script]:
  """The baselines of a category, by name."""

  def nothing(attempt: benchmark.Attempt) -> None:
    attempt.respond(tau2_oracles.nothing(category))

  if category != 'telecom_solo':
    return {'nothing': nothing}
  return {'nothing': nothing, 'blind': _blind, 'reading': _reading}


def _blind(attempt: benchmark.Attempt) -> None:
  for name, arguments in _BLIND:
    _call(attempt, name, arguments)
  attempt.respond(tau2_oracles.DONE)


def _reading(attempt: benchmark.Attempt) -> None:
  """Service first, then data, then messages: each needs the ones before."""
  abroad = 'abroad' in attempt.instruction
  network = _call(attempt, 'check_network_status')
  if 'Airplane Mode: ON' in network:
    _call(attempt, 'toggle_airplane_mode')
  sim = _call(attempt, 'check_sim_status')
  if 'locked' in sim.lower():
    return _hand_over(attempt)
  if 'No SIM' in sim:
    _call(attempt, 'reseat_sim_card')
  line = _object(_call(attempt, 'get_details_by_id', {'id': LINE}))
  if line.get('status') == 'Suspended' and not _resume(attempt, line):
    return _hand_over(attempt)
  if abroad and not line.get('roaming_enabled'):
    _call(attempt, 'enable_roaming', _ACCOUNT)
  if abroad and 'Data Roaming Enabled: No' in network:
    _call(attempt, 'toggle_roaming')
  if 'Mobile Data Enabled: No' in network:
    _call(attempt, 'toggle_data')
  usage = _object(_call(attempt, 'get_data_usage', _ACCOUNT))
  if _number(usage, 'data_used_gb') >= _number(
    usage, 'data_limit_gb'
  ) + _number(usage, 'data_refueling_gb'):
    _call(attempt, 'refuel_data', _ACCOUNT | {'gb_amount': 2.0})
  _mend_device(attempt)
  attempt.respond(tau2_oracles.DONE)


def _mend_device(attempt: benchmark.Attempt) -> None:
  mode = _call(attempt, 'check_network_mode_preference')
  if '2g' in mode or '3g' in mode:
    _call(attempt, 'set_network_mode_preference', _MODE)
  if 'is ON' in _call(attempt, 'check_data_restriction_status'):
    _call(attempt, 'toggle_data_saver_mode')
  if 'ON' in _call(attempt, 'check_vpn_status'):
    _call(attempt, 'disconnect_vpn')
  if 'ON' in _call(attempt, 'check_wifi_calling_status'):
    _call(attempt, 'toggle_wifi_calling')
  app = {'app_name': _MESSAGING}
  granted = _call(attempt, 'check_app_permissions', app)
  for name in _PERMISSIONS:
    if name not in granted:
      _call(attempt, 'grant_app_permission', app | {'permission': name})
  apn = _call(attempt, 'check_apn_settings')
  if 'http' not in apn or 'internet' not in apn:
    _call(attempt, 'reset_apn_settings')
    _call(attempt, 'reboot_device')


def _resume(attempt: benchmark.Attempt, line: types.Json) -> bool:
  """Pays what is overdue and resumes the line, unless its contract ended."""
  bills = _call(attempt, 'get_bills_for_customer', {'customer_id': CUSTOMER})
  for bill in json.loads(bills or '[]'):
    if bill['status'] == 'Overdue':
      owed = {'customer_id': CUSTOMER, 'bill_id': bill['bill_id']}
      _call(attempt, 'send_payment_request', owed)
      _call(attempt, 'make_payment')
  if (line.get('contract_end_date') or '9') < (
    line.get('suspension_start_date') or ''
  ):
    return False
  _call(attempt, 'resume_line', _ACCOUNT)
  _call(attempt, 'reboot_device')
  return True


def _hand_over(attempt: benchmark.Attempt) -> None:
  summary = {'summary': 'No tool can mend this.'}
  _call(attempt, 'transfer_to_human_agents', summary)
  attempt.respond(tau2_oracles.DONE)


def _call(
  attempt: benchmark.Attempt, name: str, arguments: types.Json | None = None
) -> str:
  call = types.ToolCall(name=name, arguments=arguments or {})
  answers = attempt.respond(benchmark.Reply(text='', calls=(call,)))
  return answers[0].text if answers else ''


def _object(text: str) -> types.Json:
  try:
    return json.loads(text)
  except ValueError:
    return {}  # an error, in words


def _number(fields: types.Json, key: str) -> float:
  return float(fields.get(key) or 0)
