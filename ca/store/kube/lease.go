package kube

import (
	"context"
	"math"
	"strings"
	"time"

	coordination "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/ca/store"
)

// The longest lease that is believed in, whatever the Lease says.
const maxLife = time.Minute

// record is what a holder writes of itself. A change of anything else, such as of labels, is no sign of life.
type record struct {
	holder            string
	seconds, changes  int32
	acquired, renewed time.Time
}

// observed is a record and when it was first seen here, by the clock that only goes forward. Clocks of several machines are
// never compared: who waits for a lease to end counts from when it saw that lease change last.
type observed struct {
	record record
	since  time.Time
}

// leasePatch sets what we know of a Lease, for one version of it.
type leasePatch struct {
	Metadata version   `json:"metadata"`
	Spec     leaseSpec `json:"spec"`
}

type leaseSpec struct {
	HolderIdentity       string            `json:"holderIdentity"`
	LeaseDurationSeconds int32             `json:"leaseDurationSeconds"`
	LeaseTransitions     int32             `json:"leaseTransitions"`
	AcquireTime          *metav1.MicroTime `json:"acquireTime"`
	RenewTime            *metav1.MicroTime `json:"renewTime"`
}

// Hold implements store.Lease. A process that sees a lease for the first time waits for its whole life: it cannot know how
// much of that is over.
func (s *Store) Hold(ctx context.Context, holder string, life time.Duration) (held bool, by string, err error) {
	err = s.do(ctx, "taking the lease in", s.leaseObject(), func(ctx context.Context) error {
		if err := store.CheckLease(holder, life); err != nil {
			return err
		}
		for n := 0; ; n++ {
			by, err = s.hold(ctx, holder, life)
			// Of a conflict the cause may be another replica that now has the lease, or who changes labels, or this very request,
			// sent again by client-go: then the lease names us.
			if !apierrors.IsConflict(err) || !pause(ctx, n, retryFirst, retryMost) {
				return err
			}
		}
	})
	if err != nil {
		return false, "", err
	}
	return by == holder, by, nil
}

// hold takes the lease if it is free and says who has it then.
func (s *Store) hold(ctx context.Context, holder string, life time.Duration) (by string, err error) {
	lease, err := s.lease(ctx)
	if err != nil {
		return "", err
	}
	have := recordOf(lease)
	if have.holder != holder && have.holder != "" && !s.over(have) {
		return have.holder, nil
	}
	now := metav1.NowMicro()
	next := leaseSpec{holder, int32((life + time.Second - 1) / time.Second), have.changes, &now, &now}
	if have.holder != holder {
		next.LeaseTransitions = min(max(have.changes, 0), math.MaxInt32-1) + 1
	} else if !have.acquired.IsZero() {
		next.AcquireTime = &metav1.MicroTime{Time: have.acquired}
	}
	return holder, s.patch(ctx, s.leaseObject(), leasePatch{version{lease.ResourceVersion}, next})
}

// GiveUp implements store.Lease.
func (s *Store) GiveUp(ctx context.Context, holder string) error {
	return s.do(ctx, "giving up the lease in", s.leaseObject(), func(ctx context.Context) error {
		for n := 0; ; n++ {
			err := s.giveUp(ctx, holder)
			if !apierrors.IsConflict(err) || !pause(ctx, n, retryFirst, retryMost) {
				return err
			}
		}
	})
}

func (s *Store) giveUp(ctx context.Context, holder string) error {
	lease, err := s.lease(ctx)
	if err != nil {
		return err
	}
	have := recordOf(lease)
	if have.holder != holder || holder == "" {
		return nil
	}
	now := metav1.NowMicro()
	return s.patch(ctx, s.leaseObject(), leasePatch{version{lease.ResourceVersion}, leaseSpec{"", 1, have.changes, &now, &now}})
}

func (s *Store) lease(ctx context.Context) (*coordination.Lease, error) {
	lease := &coordination.Lease{}
	return lease, s.get(ctx, s.leaseObject(), lease)
}

// over reports whether a record has been the same for its whole life here.
func (s *Store) over(r record) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if r != s.seen.record {
		s.seen = observed{r, now}
	}
	return now.Sub(s.seen.since) > r.life()
}

func (r record) life() time.Duration {
	return min(max(time.Duration(r.seconds)*time.Second, time.Second), maxLife)
}

func recordOf(lease *coordination.Lease) (r record) {
	spec := lease.Spec
	if spec.HolderIdentity != nil {
		r.holder = strings.ToValidUTF8((*spec.HolderIdentity)[:min(len(*spec.HolderIdentity), store.MaxName)], "?")
	}
	if spec.LeaseDurationSeconds != nil {
		r.seconds = *spec.LeaseDurationSeconds
	}
	if spec.LeaseTransitions != nil {
		r.changes = *spec.LeaseTransitions
	}
	if spec.AcquireTime != nil {
		r.acquired = spec.AcquireTime.UTC()
	}
	if spec.RenewTime != nil {
		r.renewed = spec.RenewTime.UTC()
	}
	return r
}
