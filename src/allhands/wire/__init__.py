"""How two processes of a job talk outside of `torch.distributed`.

`listen` makes every listener and is the only place that binds a port. An `Acceptor` reads from
strangers, with bounds, until they have proven the job's token, and hands over only those that have.
`introduce` is the other side of that proof. `LineReader` and `encode` carry lines of JSON. Nothing
that arrives is run or unpickled.
"""

from allhands.wire.acceptor import Acceptor as Acceptor
from allhands.wire.acceptor import Welcome as Welcome
from allhands.wire.framing import LineReader as LineReader
from allhands.wire.framing import MessageError as MessageError
from allhands.wire.framing import encode as encode
from allhands.wire.framing import read_into as read_into
from allhands.wire.framing import read_message as read_message
from allhands.wire.links import join as join
from allhands.wire.links import keep_alive as keep_alive
from allhands.wire.links import open_unix as open_unix
from allhands.wire.listeners import close_in_children as close_in_children
from allhands.wire.listeners import free_port as free_port
from allhands.wire.listeners import listen as listen
from allhands.wire.listeners import listen_unix as listen_unix
from allhands.wire.proof import TOKEN as TOKEN
from allhands.wire.proof import RefusedError as RefusedError
from allhands.wire.proof import introduce as introduce
from allhands.wire.proof import job_token as job_token
from allhands.wire.proof import new_token as new_token
from allhands.wire.silence import Suspension as Suspension
