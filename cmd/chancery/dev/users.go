package dev

import (
	"context"
	"fmt"
	"log/slog"
	"os/user"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/trust"
)

// maxUsers bounds the identities that one dev process keeps.
const maxUsers = 100

// usersConfig is what users needs.
type usersConfig struct {
	tokens  *tokens
	client  client.Config // but for domain, ID and token, which are each user's own
	logger  *slog.Logger
	observe func(error) // told the outcome of each renewal
	// notEnforcing tells which consumers of the agent take no notice of CRLs.
	notEnforcing func() []string
	onChange     func(*trust.Identity) // told of each new SVID
	files        string                // where what is kept of each user lies, less its ending; empty: in memory alone
}

// users gives each Unix user that connects an identity of its own.
type users struct {
	usersConfig
	added chan *member // what run has yet to start; room for maxUsers

	mu  sync.Mutex // guards all
	all map[uint32]*member
}

func newUsers(c usersConfig) *users {
	return &users{usersConfig: c, added: make(chan *member, maxUsers), all: map[uint32]*member{}}
}

// member is one user with an identity.
type member struct {
	keeper *agent.Keeper
	source sds.Source
	table  *consumers.Table // nil: none is kept
}

// run keeps the identities fresh until ctx ends.
func (u *users) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for {
		select {
		case <-ctx.Done():
			return g.Wait()
		case m := <-u.added:
			g.Go(func() error { return m.keeper.Run(ctx) })
			g.Go(func() error { u.report(ctx, m.keeper); return nil })
		}
	}
}

// attest identifies a peer by its Unix user.
func (u *users) attest(_ context.Context, p sds.Peer) (sds.Source, error) {
	m, err := u.member(p.UID)
	if err != nil {
		return nil, err
	}
	return m.source, nil
}

// consumers returns the table of a peer's user.
func (u *users) consumers(p sds.Peer) *consumers.Table {
	m, err := u.member(p.UID)
	if err != nil {
		return nil
	}
	return m.table
}

func (u *users) member(uid uint32) (*member, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if m := u.all[uid]; m != nil {
		return m, nil
	}
	if len(u.all) >= maxUsers {
		return nil, &sds.Refused{Reason: "too_many_users", Err: fmt.Errorf("%d users have identities already", maxUsers)}
	}
	domain, err := trust.ParseDomain(domainName)
	if err != nil {
		return nil, err
	}
	account := accountOf(uid)
	id, err := trust.WorkloadID(domain, namespace, account)
	if err != nil {
		return nil, err
	}
	c := u.client
	c.Domain, c.ID = domain, id
	c.Token = func(context.Context) (string, error) { return u.tokens.token(account) }
	m := new(member)
	if u.files != "" {
		if c.Anchor, err = anchor.Open(anchor.Config{File: fmt.Sprintf("%s.bundle.%d", u.files, uid), Domain: domain, Logger: u.logger}); err != nil {
			return nil, err
		}
		if m.table, err = consumers.Open(consumers.Config{File: fmt.Sprintf("%s.consumers.%d", u.files, uid), Logger: u.logger}); err != nil {
			return nil, err
		}
	}
	m.keeper = agent.NewKeeper(agent.KeeperConfig{Client: c, Logger: u.logger, Observe: u.observe, NotEnforcing: u.notEnforcing, Table: m.table})
	m.source = agent.SourceOf(m.keeper, nil)
	u.all[uid] = m
	u.added <- m // never blocks: there is room for all
	return m, nil
}

// report tells onChange of each SVID that a keeper gets.
func (u *users) report(ctx context.Context, k *agent.Keeper) {
	for last := ""; ; { // what changes may be roots or CRLs alone
		id, changed := k.Current()
		if id != nil && id.Serial() != last {
			last = id.Serial()
			u.onChange(id)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// wait returns true once the user has an SVID, false if ctx ends before.
func (u *users) wait(ctx context.Context, uid uint32) (bool, error) {
	m, err := u.member(uid)
	if err != nil {
		return false, err
	}
	for {
		id, changed := m.keeper.Current()
		if id != nil {
			return true, nil
		}
		select {
		case <-ctx.Done():
			return false, nil
		case <-changed:
		}
	}
}

func (u *users) keepers() []*agent.Keeper {
	u.mu.Lock()
	defer u.mu.Unlock()
	var out []*agent.Keeper
	for _, m := range u.all {
		out = append(out, m.keeper)
	}
	return out
}

// accountOf returns a user's name as the name of a service account: DNS-1123, or uid-N where it cannot be.
func accountOf(uid uint32) string {
	n := strconv.FormatUint(uint64(uid), 10)
	u, err := user.LookupId(n)
	if err != nil {
		return "uid-" + n
	}
	return accountName(u.Username, n)
}

// accountName makes the name of a service account; two users must not get the same one.
func accountName(username, uid string) string {
	if username == "" || len(username) > 63 || strings.Trim(username, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" ||
		username[0] == '-' || username[len(username)-1] == '-' || strings.HasPrefix(username, "uid-") {
		return "uid-" + uid
	}
	return username
}
