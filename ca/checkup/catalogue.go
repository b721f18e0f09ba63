package checkup

import "slices"

// Entry is what there is to say of a finding whatever it is found on.
type Entry struct {
	ID         string
	Severities []Severity // that it can have
	Meaning    string
	Remedy     string
}

func entry(id string) (Entry, bool) {
	i := slices.IndexFunc(Catalogue, func(e Entry) bool { return e.ID == id })
	if i < 0 {
		return Entry{}, false
	}
	return Catalogue[i], true
}

var (
	warns     = []Severity{Warning}
	criticals = []Severity{Critical}
	both      = []Severity{Warning, Critical}
)

// Catalogue lists all that can be found. IDs are stable: alerts match on them. docs/operations.md has a row for each, which a
// test holds to this list.
var Catalogue = []Entry{
	{"unchecked", warns, "It is not known whether this is well.",
		"Remove the reason that is given, such as a missing right, and look again."},

	// The server and what it issues with.
	{"server.down", criticals, "No server runs here. If it is the only one, nobody gets or renews a certificate; if others are on the store, agents go to them.",
		"Start it; the other findings may say why it ended. If it is meant to be down, use --offline."},
	{"server.silent", criticals, "The server accepts connections on admin.sock and does not answer: it hangs, or is overloaded.",
		"Look at its log and at the machine's load and disks; restart it if it does not recover."},
	{"server.not-ready", both, "The server runs and issues nothing; gRPC health and /readyz say so too. A warning within 30 s of its start, if it was not ready yet.",
		"Follow the reason that is given; the other findings may name the cause."},
	{"issuer.missing", criticals, "There is nothing to sign with, so the server does not start, or, with a `parent` in the config, is not ready.",
		"Where the root is kept elsewhere: `chancery authority csr`, have it signed, `chancery authority import`. With a parent: the server's log says what it answered."},
	{"issuer.overdue", criticals, "The server renews its issuer at half of its life and has not been able to: once the issuer ends, nothing can be issued.",
		"The server's log says why (`issuer not renewed`); most often the root's key does not open or the state cannot be written."},
	{"authority.tainted", criticals, "Its key is thought to be known to others, who can make certificates for anybody with it. They are accepted until its root has left every bundle; certificates under it renew by token only.",
		"`chancery rotate status` says what the rotation waits for. If none is under way: `chancery rotate start --root --reason compromised`."},
	{"certificate.ended", both, "Nothing under this certificate verifies any more. A warning only where a server that starts renews it.",
		"Issuer: start the server, import a new one, or replace the plugged-in files, whichever renews it. Root: a new trust domain setup is needed."},
	{"certificate.ending", both, "Less than a third of its life is left (a quarter, for plugged-in files), which is not so while renewal works; critical below a tenth.",
		"Issuer: find out why it was not renewed (server's log; its parent; `authority csr` and `import`; the tool that writes the files). Root: `chancery rotate plan --root`."},
	{"certificate.not-begun", criticals, "The clock here is behind the one of whoever issued the certificate, or it was made for later. Nothing verifies until then.",
		"Check the clock (`timedatectl`); if it is right, have the certificate made again."},
	{"chain.broken", criticals, "The issuing certificate does not lead to a root that is trusted, so the server does not start.",
		"Put back the files, or the state, that belong together."},
	{"issuer-files.unusable", both, "The plugged-in issuer cannot be used as it lies there: a server does not start; one that runs goes on with the former one (warning).",
		"Follow the reason (a root is replaced in three steps: docs/config.md); have the tool that writes the files write them again, or put the former ones back."},
	{"root.ended", warns, "Verifiers pass over it; it does no harm and no good.",
		"Nothing has to be done. An own one leaves with the next `chancery rotate start --root`; take one of plugged-in files out of them."},
	{"root.too-short", criticals, "From now on issuers and certificates are cut short by their root's end.",
		"Rotate the root: `chancery rotate plan --root`, then `start`. Every verifier must have the new one before the old one ends."},
	{"key.failed", both, "Nothing can be signed with this key. The issuer's is needed for each certificate (critical); the root's for the next renewal of the issuer.",
		"Follow the reason; see docs/keys.md for the store. A token may have been taken out, restarted, or its PIN changed."},
	{"key.slow", warns, "Each certificate waits for a signature of this key.",
		"Look at the token or its network; raise its sessions. No answer within 30 s counts as failed."},
	{"key.unwatched", warns, "Keys are checked once a minute; this one was not.",
		"The server is overloaded or its check hangs; look at its log."},
	{"cluster.not-ready", both, "The server never reached what it needs to verify this cluster's tokens, and is not ready until it does. A warning within 30 s of its start.",
		"Follow the reason: most often the address, the kubeconfig's rights, or the key file is wrong."},
	{"cluster.lost", both, "Requests that need this cluster get Unavailable; certificates that were issued stay good. Critical if no cluster is ready.",
		"Follow the reason: most often the API server is down or cannot be reached."},
	{"signing.failing", both, "Requests for certificates in Kubernetes' own APIs wait for longer than a minute: new pods with such a volume do not start, and certificates of running ones end. None was told that it failed: each is met once this is over. A warning within 30 s of the server's start.",
		"Follow the reason: most often a right that lacks (deploy/kubernetes/signing/rbac.yaml), the API server, or an issuer that cannot sign (another finding)."},
	{"publishing.failing", warns, "Readers of ClusterTrustBundles or ConfigMaps may have older roots, and a rotation waits in gate `readers`; or another manager, such as istiod, has one of the keys, and it is left to it.",
		"Follow the reason: a right that lacks (deploy/kubernetes/publishing/rbac.yaml), the API server, or who else writes there (docs/kubernetes.md, \"Who writes there, too\")."},
	{"naming.failing", both, "Who may serve a service is not kept up to date: new workloads of it may be refused, and former ones accepted, until it is. Critical where not all has been read once since the server's start: agents that know no list yet give out no `service:` context.",
		"Follow the reason: most often a right that lacks (deploy/kubernetes/naming/rbac.yaml), or an API server that is down. `chancery naming list` says the same at once."},
	{"requests.internal", warns, "Each is a fault of the server, not of who asked.",
		"Look for the same time in the server's log, and report it."},
	{"requests.busy", warns, "More requests come than are worked on within admission.maxWait; agents try again.",
		"A passing rush needs nothing. Else find who asks (`denied` lines of the audit log), or give the server more processors."},

	// Revocation.
	{"crl.off", warns, "One issuer cannot have a CRL, so none is published: verifiers would refuse all of its certificates. What is revoked renews nothing, and is accepted until it ends.",
		"Follow the reason. A plugged-in issuer needs the key usage cRLSign; what an older version retired ends by itself; a key store must answer."},
	{"crl.incomplete", warns, "A certificate that was revoked may not be on it: it renews nothing, and is accepted until it ends. The issuer's key is gone, or a server whose issuance log has it is.",
		"Start that server, or put the issuer's key back. If it is lost, nothing, once what it issued has ended; a server's log is named for 90 days after it was forgotten."},
	{"crl.stale", both, "Revocations since then may not have reached verifiers. Once a CRL has ended, agents serve none: what is revoked is accepted. Critical if it fails, or ends within a day.",
		"Follow the reason, also in the server's log (`revocations are not up to date`); most often the state or the issuance log, or a key that does not sign."},
	{"crl.unacknowledged", warns, "These agents refused the last update, or do not answer: what is revoked is accepted behind them.",
		"`chancery revoke list` names them with their reason; look at their log, or restart them."},

	// Rotation.
	{"rotation.waiting", warns, "A gate of a rotation has not passed for twice as long as was estimated (10 minutes at the least; a day where nothing could be estimated). Nothing fails: it waits.",
		"`chancery rotate status` names who is waited for, and why; docs/rotation.md has a section for each gate."},
	{"rotation.paused", warns, "A rotation has been paused for more than a day, or for more than an hour though a key may be known to others. It waits for an admin.",
		"`chancery rotate resume`, `abort` or `rollback`."},
	{"rotation.failing", warns, "The server that drives the rotation tries a step again each second, and cannot take it.",
		"Follow the reason: most often a key store that makes no key, the state, or the audit log."},
	{"rotation.overridden", warns, "Who had not said that it was ready may refuse others, or be refused, until it has caught up. It is said until the rotation ends.",
		"Watch those that the gate named; `chancery rotate rollback` goes back before phase retire."},

	// Federation.
	{"federation.failing", warns, "The roots of a foreign trust domain are not kept up to date: the last ones stay, until that domain signs under others. Three refresh periods have passed, or there were never any.",
		"Follow the reason: address, network, certificate of the endpoint. `chancery trust refresh` tries again; docs/federation.md has a section for each kind of failure."},
	{"bundle-endpoint.failing", both, "Its certificate cannot be read again, ends within a day, or has ended (critical): those who federate with this trust domain cannot get its roots.",
		"Renew the files that bundleEndpoint names; they are read again within seconds."},

	// Logs.
	{"audit-log.failed", criticals, "Without the audit log nothing is signed.",
		"Make room on the disk, or the path writable. The server tries again each second and needs no restart."},
	{"audit-log.moved", criticals, "Lines go to a file that was moved or deleted: they may be lost.",
		"Send the server SIGHUP after each move of the file; have logrotate do so (postrotate)."},
	{"audit-log.unusable", criticals, "A server could not write it, and would not start.",
		"Make the folder, or give the server's user the right to write there."},
	{"issuance-log.failed", criticals, "Without the issuance log nothing is signed.",
		"Make room on the disk, or the folder writable. The server tries again each second and needs no restart."},
	{"issuance-log.late", warns, "What is issued waits in a journal: it is not lost, but no checkpoint vouches for it yet.",
		"Follow the reason; most often the disk is slow or full."},
	{"issuance-log.unusable", criticals, "A server could not open it, and would not start.",
		"Put the folder back, or give the server's user the rights; `chancery log verify DIR` checks all that is in it."},
	{"issuance-log.other", criticals, "The authority document lists another log than the folder holds, so the server does not start: history would be missing.",
		"Put the right folder back, or name it in issuanceLog."},

	// The store, and other servers on it.
	{"store.down", both, "Certificates are issued from the last document that is known, until its issuer ends; nothing is revoked, renewed or imported. Critical after 5 minutes, or once the issuer is due for renewal.",
		"Follow the reason; see `state.unreachable`. If the store is lost, `chancery state export` still works on a server that runs: docs/recovery.md."},
	{"replica.gone", both, "A server that the authority document lists says nothing: the next issuer waits for it. Critical if that goes on for an hour while the issuer is due for renewal.",
		"Start it. If it will not come back: `chancery replica forget NAME`. What it issued can be revoked by what its issuance log has (docs/recovery.md)."},
	{"replica.behind", warns, "That server has not taken over the newest document: what was revoked may not be so for its agents, and the next issuer waits for it.",
		"Look at its status and log: the store, or the key of the issuer that was prepared, may be out of its reach."},
	{"replica.refused", warns, "What that server tells the others is not taken: it was changed, or is of another version of Chancery or another sealing key.",
		"Give all servers on the store the same sealing key, and update the oldest."},

	// State and keys at rest.
	{"state.missing", criticals, "There is no authority document, so the server does not start.",
		"`chancery authority init` makes one, once; if there was one, restore it."},
	{"state.refused", criticals, "The document was changed, belongs to another sealing key, or is of a newer version of Chancery: the server does not start.",
		"Restore state and sealing key that belong together; all servers on one store have the same key."},
	{"state.rolled-back", criticals, "The store has an older document than this server has seen, so it does not start: revocations may have been undone.",
		"docs/recovery.md, \"The store was rolled back\": import the newest document that a server or an export has; find out who can write the store."},
	{"config.other-domain", warns, "The config names a trust domain that this authority was before, or is about to be: it works as the present one does, but who reads it is misled.",
		"Once the migration has ended (`chancery trust migrate status`): set `trustDomain` to the present one. Where agents or policies still name the old one, list that in `trustDomainAliases`."},
	{"mark.unusable", criticals, "What this server has seen of the authority document is not known: an older one would not be noticed, so it does not start.",
		"Put the file back. If it is lost: take it away and `chancery replica forget` this server, which registers it anew (docs/recovery.md)."},
	{"state.unreachable", criticals, "The shared store does not answer here, so a server does not start.",
		"Follow the reason: address, password, certificates, rights of the account (docs/postgres.md and docs/kubernetes-state.md list them), or the engine itself."},
	{"sealing-key.unusable", criticals, "Without it the state cannot be read or trusted, and the server does not start.",
		"Restore it from where it is kept apart; it should have mode 0600 and belong to the server's user."},
	{"bundle-key.unusable", criticals, "Bundles are not signed. Agents that have pinned the bundle key take no roots and no CRLs from this server, and go on with the last ones.",
		"Restore an export from before it was damaged (docs/recovery.md, \"The bundle key is lost\"). Certificates are issued meanwhile."},
	{"bundle-key.missing", warns, "Agents pin no key, and believe whoever has a certificate of the server about roots. A version before this one made the authority.",
		"Nothing: the server that renews issuers makes it within a minute. Its log says why, if it does not."},
	{"sealing-key.beside-state", warns, "Whoever gets this folder, such as from a backup, has the CA's keys (decision D9).",
		"Move the key to another medium, such as a tmpfs that a secrets manager fills, and name it in state.sealingKey."},
	{"passphrase.beside-keys", warns, "Whoever gets this folder, such as from a backup, has the CA's keys.",
		"Move the passphrase to another medium and name it in keys.passphraseFile."},
	{"roots-file.missing", warns, "Agents are set up with this file.",
		"`chancery authority init` writes it again; it changes nothing else."},
	{"roots-file.differs", warns, "Agents that are set up with this file will not trust this server, or trust others.",
		"Find out who changed it; `chancery authority show -o pem` prints the roots."},

	// The machine.
	{"file.exposed", both, "Others on this machine can read what they should not: a secret (critical; the server refuses most of these), or who got what.",
		"`chmod` to the mode that is given; if it held a secret, consider that known."},
	{"file.writable", warns, "Who can write it can harm the CA; docs/security.md says how for each file.",
		"`chmod` to the mode that is given."},
	{"file.unreadable", both, "Critical: a server of this user does not start without it. A warning where it goes on.",
		"Put it in place; give the server's user the right to read it."},
	{"file.owner", warns, "It belongs to another user than the state does: most often a command was run as root. The server may not be able to open it.",
		"`chown` it to the server's user."},
	{"folder.writable", warns, "Who can write the folder can replace the files in it, and admin.sock.",
		"It should belong to the server's user (or root) and have no write bit for others: `chmod go-w`."},
	{"place.volatile", warns, "It lies in memory (tmpfs) and is gone after a restart of the machine.",
		"Name a place on a disk."},
	{"disk.low", both, "Once it is full nothing is signed. Warning below 1 GiB (or a tenth, if that is less) or 5 % of inodes; critical below 100 MiB (or a fiftieth) or 1 %.",
		"Make room; ship the audit log off the machine, move it away and send SIGHUP."},
	{"clock.behind", warns, "Something here was written at a time that is still to come: the clock was set back, or is wrong. Certificates may begin or end at the wrong time.",
		"Check the clock (`timedatectl`, NTP)."},

	// An agent.
	{"agent.down", criticals, "No agent answers on the socket: proxies of this node get no identity.",
		"Start it; the other findings may say why it ended."},
	{"agent.no-identity", criticals, "The agent runs and has no identity to give.",
		"Its log says why; most often the server, the token or the roots: see the other findings."},
	{"svid.ending", both, "SVIDs are renewed at half of their life, so renewal has been failing: warning below a third, critical below a tenth or once it has ended.",
		"The agent's log says why; most often the server or the token: see the other findings."},
	{"token.unusable", criticals, "Without a token the agent gets no first identity, and cannot renew one for longer than maxRenewalAge.",
		"Put the token in place (a projected service-account token, which the kubelet refreshes) and let the agent's user read it."},
	{"token.ending", both, "It is not being refreshed: the kubelet does so when a fifth of its life is left. Warning below a tenth, critical once it has ended.",
		"See that the token comes from a projected volume, and that the kubelet works."},
	{"token.other-account", warns, "The server gives an identity to its own account only, unless the token is a node agent's.",
		"Let `identity` and the token's service account agree."},
	{"roots.unusable", criticals, "The agent cannot verify its server.",
		"Copy roots.pem from the server again."},
	{"roots.outdated", warns, "This agent goes by the bundle that it keeps and talks to the server; nothing in serverRoots vouches for it any more, so a new agent, or one that lost its `bundle` file, would not.",
		"Put what `chancery authority show -o pem -c SERVER.yaml` prints on a server into serverRoots; no restart. If nobody has rotated the roots, find out who changed the file."},
	{"server.unreachable", both, "The agent cannot renew its identity there: warning while another one of its servers answers, else critical.",
		"Check the address, the network and that the server runs."},
	{"server.unverified", criticals, "Whatever answers does not prove to be this trust domain's server, so the agent does not talk to it.",
		"If the roots were rotated while the agent was off: put what `chancery authority show -o pem -c SERVER.yaml` prints on a server into serverRoots; no restart. Else check that `server` is the right address: somebody may be in between."},
}
