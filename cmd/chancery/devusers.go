package main

import (
	"context"
	"fmt"
	"log/slog"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

// maxDevUsers bounds the identities that one dev process keeps.
const maxDevUsers = 100

// devUsers gives each Unix user that connects an identity of its own.
type devUsers struct {
	ctx      context.Context // of the process; keepers live as long
	logger   *slog.Logger
	tokens   *devTokens
	client   client.Config
	contact  func(error)
	onChange func(*trust.Identity) // told of each new SVID
	wg       errgroup.Group

	mu  sync.Mutex // guards all
	all map[uint32]*devUser
}

type devUser struct {
	keeper *rotate.Keeper
	source sds.Source
}

// attest identifies a peer by its Unix user.
func (d *devUsers) attest(_ context.Context, p sds.Peer) (sds.Source, error) {
	u, err := d.user(p.UID)
	if err != nil {
		return nil, err
	}
	return u.source, nil
}

func (d *devUsers) user(uid uint32) (*devUser, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u := d.all[uid]; u != nil {
		return u, nil
	}
	if len(d.all) >= maxDevUsers {
		return nil, &sds.Refused{Reason: "too_many_users", Err: fmt.Errorf("%d users have identities already", maxDevUsers)}
	}
	domain, err := trust.ParseDomain(devDomain)
	if err != nil {
		return nil, err
	}
	name := d.nameOf(uid)
	id, err := trust.WorkloadID(domain, devNS, name)
	if err != nil {
		return nil, err
	}
	c := d.client
	c.Domain, c.ID = domain, id
	c.Token = func(context.Context) (string, error) { return d.tokens.token(name) }
	u := &devUser{keeper: newClientKeeper(c, d.logger, d.contact)}
	u.source = viewOf(u.keeper, nil)
	if d.all == nil {
		d.all = map[uint32]*devUser{}
	}
	d.all[uid] = u
	d.wg.Go(func() error { return u.keeper.Run(d.ctx) })
	d.wg.Go(func() error { d.report(u.keeper); return nil })
	return u, nil
}

// report tells onChange of each SVID that a keeper gets.
func (d *devUsers) report(k *rotate.Keeper) {
	for {
		id, changed := k.Current()
		if id != nil {
			d.onChange(id)
		}
		select {
		case <-d.ctx.Done():
			return
		case <-changed:
		}
	}
}

// wait returns once the user has an SVID.
func (d *devUsers) wait(ctx context.Context, uid uint32) error {
	u, err := d.user(uid)
	if err != nil {
		return err
	}
	for {
		id, changed := u.keeper.Current()
		if id != nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// nameOf returns a user's name as the name of a service account: DNS-1123, or uid-N where it cannot be.
func (d *devUsers) nameOf(uid uint32) string {
	n := strconv.FormatUint(uint64(uid), 10)
	u, err := user.LookupId(n)
	if err != nil {
		return "uid-" + n
	}
	name := strings.ToLower(u.Username)
	if name == "" || len(name) > 63 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || name[0] == '-' || name[len(name)-1] == '-' {
		return "uid-" + n
	}
	return name
}

func (d *devUsers) expiries() map[string]time.Time {
	d.mu.Lock()
	var keepers []*rotate.Keeper
	for _, u := range d.all {
		keepers = append(keepers, u.keeper)
	}
	d.mu.Unlock()
	return keeperExpiries(keepers...)()
}
